// conclave run: runs a checkpoint's MoE layers on hidden states, timed and checked.
#include "checks.h"
#include "commands.h"
#include "input/adapter_option.h"
#include "input/batch.h"
#include "input/choice_options.h"
#include "input/file_roles.h"
#include "input/layer_selection.h"
#include "input/machine_options.h"
#include "input/shape_options.h"
#include "interrupt.h"
#include "layer_table.h"
#include "output/numbers.h"
#include "output/results_file.h"
#include "ranks/run_on_ranks.h"
#include "ranks/split_layer.h"
#include "trace/record_trace.h"
#include "trace/recorded_routing.h"

#include "conclave/checkpoint.h"
#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

namespace conclave::tool {
namespace {

struct RunOptions {
  std::string model_dir;
  std::string layers;
  std::string experts = "text";
  bool extra_layers = false;
  std::string input;
  std::string record;
  std::optional<int64_t> random_tokens;
  uint64_t seed = 0;
  std::string routing = "gate";
  ChoiceOptions choices;
  std::string record_routing;
  std::string replay;
  std::string reference;
  std::optional<double> tolerance;
  int64_t sample = 8;
  std::string output;
  std::string trace;
  bool trace_weights = false;
  int32_t repetitions = 5;
  bool check_manifest = false;
  std::string rows;
  std::string adapter;
  MachineOptions machine;
  RankOptions ranks;
  OutputOptions printing;
};

using LayerList = std::vector<const CheckpointLayer*>;

class RunCommand {
 public:
  RunCommand(const RunOptions& options, const RankTeam& team)
      : options_(options),
        team_(team),
        format_(parse_output_format(options.printing.format)),
        checkpoint_(
            Checkpoint::open(options.model_dir, {.access = file_access(options.machine),
                                                 .experts = parse_expert_set(options.experts),
                                                 .extra_layers = options.extra_layers,
                                                 .verify_manifest = options.check_manifest})),
        layers_(select_layers(checkpoint_, options.layers)),
        adapter_(options.adapter),
        batches_(batch_options(options)),
        console_(team.leads() ? options.printing.progress() : ProgressMode::kOff),
        context_(make_context(options.machine, &console_, team)),
        table_(team.out(), format_, LayerTable::Speeds::kShown) {
    if (!options.reference.empty()) reference_.emplace(options.reference, options.record);
    if (!options.replay.empty()) replay_.emplace(RoutingRecord::open(options.replay));
  }

  ExitCode run() {
    check_inputs();
    print_header();
    for (const CheckpointLayer* layer : layers_) {
      const LayerRow row = run_one(*layer);
      console_.clear();
      if (team_.leads()) table_.add(row);
      team_.meet("check the layer");
    }
    if (results_) results_->finish();
    if (trace_) trace_->finish();
    if (routing_) routing_->finish();
    if (!team_.leads()) return ExitCode::kOk;
    const bool ok = table_.finish();
    return ok ? ExitCode::kOk : ExitCode::kOutsideTolerance;
  }

 private:
  static BatchOptions batch_options(const RunOptions& options) {
    BatchOptions batch;
    batch.input = options.input;
    batch.record = options.record;
    batch.random_tokens = options.random_tokens.value_or(batch.random_tokens);
    batch.seed = options.seed;
    batch.routing = options.routing == "file" ? RoutingFrom::kFile : RoutingFrom::kGate;
    return batch;
  }

  double tolerance(const MoeSpec& spec, const Batch& batch) const {
    return options_.tolerance.value_or(accuracy_bar(spec.weight_dtype, batch.hidden.dtype()));
  }

  // All inputs are checked before the first layer is loaded.
  void check_inputs() {
    std::vector<ResultShape> shapes;
    std::vector<TracedLayer> traced;
    std::vector<RecordedLayer> recorded;
    int64_t most_tokens = 0;
    for (const CheckpointLayer* layer : layers_) {
      const BatchShape batch = batches_.check(layer->index, layer->spec);
      const ChoiceLimitsOfLayer limits(options_.choices, layer->spec);
      if (replay_) check_record(replay_->record(), options_.replay, layer->index, layer->spec);
      if (replay_) ReplayedLayer(*replay_, layer->index, layer->spec, batch.num_tokens);
      recorded.push_back(RecordedLayer::of(layer->index, layer->spec));
      most_tokens = std::max(most_tokens, batch.num_tokens);
      shapes.push_back({.layer = layer->index,
                        .num_tokens = batch.num_tokens,
                        .spec = layer->spec,
                        .output_dtype = batch.dtype,
                        .has_logits = !batch.gives_ids && !replay_});
      traced.push_back({.layer = layer->index, .tokens = batch.num_tokens, .spec = layer->spec});
      if (reference_) reference_->find_output(layer->index, layer->spec, batch.num_tokens);
    }
    std::optional<TraceInfo> trace;
    if (!options_.trace.empty()) {
      trace = trace_info(options_.model_dir, checkpoint_.model_type(), traced);
    }
    if (!team_.leads()) return;
    if (!options_.record_routing.empty()) {
      routing_.emplace(options_.record_routing, recorded, most_tokens, options_.model_dir,
                       checkpoint_.model_type());
    }
    if (!options_.output.empty()) results_.emplace(options_.output, shapes);
    if (trace) {
      trace_.emplace(options_.trace, *trace,
                     options_.trace_weights ? TraceWeights::kYes : TraceWeights::kNo);
    }
  }

  void print_header() {
    const MoeSpec spec = with_rows(options_.rows, layers_.front()->spec, options_.model_dir);
    const Plan plan =
        make_plan(context_, spec, layer_options(options_.machine, 1), team_.parallel());
    uint64_t bytes = 0;
    for (const CheckpointLayer* layer : layers_) bytes += layer->bytes;
    nlohmann::ordered_json facts = machine_facts(context_);
    facts["device"] = plan.device;
    facts["isa"] = plan.isa;
    facts["arithmetic"] = plan.arithmetic;
    facts["model"] = options_.model_dir;
    facts["model_type"] = checkpoint_.model_type();
    const std::string check =
        reference_ ? fmt::format("every token against {}", options_.reference)
                   : fmt::format("up to {} tokens per layer against float64", options_.sample);
    add_facts(team_, facts);
    std::vector<std::string> lines = {
        fmt::format("{}, {}", machine_line(context_), compute_text(plan)),
        fmt::format("model: {}, {}, {} of {} MoE layers, {}, {}", options_.model_dir,
                    checkpoint_.model_type(), layers_.size(), checkpoint_.layers().size(),
                    shape_text(spec), bytes_text(bytes)),
        fmt::format("input: {}{}{}", batches_.describe(), options_.choices.any() ? "; " : "",
                    options_.choices.describe()),
        fmt::format("check: {}", check)};
    if (adapter_) {
      facts["adapter"] = options_.adapter;
      lines.push_back("adapter: " + adapter_.describe());
    }
    if (!team_.alone()) lines.push_back("ranks: " + team_.describe());
    table_.writer().header(facts, lines);
  }

  LayerRow run_one(const CheckpointLayer& info) {
    check_interrupt();
    console_.subject(fmt::format("layer {}", info.index));
    const Batch batch = batches_.load(info.index, info.spec);
    LayerInput input = batch.view();
    const std::optional<LoraAdapter> adapter = adapter_.of_layer(info.index, checkpoint_);
    if (adapter) input.adapter = &*adapter;
    const MoeSpec spec = with_rows(options_.rows, info.spec, options_.model_dir);
    const ChoiceLimitsOfLayer limits(options_.choices, spec);
    limits.apply(input);
    std::optional<ReplayedLayer> replayed;
    if (replay_) {
      replayed.emplace(*replay_, info.index, spec, input.num_tokens());
      replayed->apply(input);
    }
    const std::unique_ptr<WeightSource> source = checkpoint_.layer_source(info.index);
    const int64_t planned = std::clamp<int64_t>(input.num_tokens(), 1, LayerOptions().max_tokens);
    const LayerRun result =
        run_split_layer({.team = team_,
                         .context = context_,
                         .spec = spec,
                         .source = *source,
                         .options = adapter_.with_room(layer_options(options_.machine, planned))},
                        input, options_.repetitions);
    if (!team_.leads()) return {};
    if (results_) results_->write(result);
    if (routing_) routing_->add(info.index, result);
    if (trace_) trace_->write(result.topk_ids.view(), result.topk_weights.view());

    LayerRow row{.layer = info.index,
                 .spec = spec,
                 .tokens = input.num_tokens(),
                 .work = {},
                 .ms = result.median_ms,
                 .weights = result.weights,
                 .check = {}};
    row.work = layer_work(spec, row.tokens, result.expert_load);
    const double bar = tolerance(spec, batch);
    row.check = reference_ ? check_against_file(*reference_, info.index, spec, result, bar)
                           : check_against_float64(context_, spec, *source, input, result,
                                                   options_.sample, bar);
    return row;
  }

  const InterruptScope interrupt_;  // files that are not whole go before it ends
  const RunOptions& options_;
  const RankTeam& team_;
  const OutputFormat format_;
  const Checkpoint checkpoint_;
  const LayerList layers_;
  const AdapterOption adapter_;
  const BatchSource batches_;
  std::optional<LayerTensors> reference_;
  Console console_;
  const Context context_;
  LayerTable table_;
  std::optional<ResultsFile> results_;
  std::optional<TraceWriter> trace_;
  std::optional<RoutingReplay> replay_;
  std::optional<RoutingFile> routing_;
};

void validate(const RunOptions& options) {
  const std::array files = {FileRole{"--output", options.output, true},
                            FileRole{"--trace", options.trace, true},
                            FileRole{"--record-routing", options.record_routing, true},
                            FileRole{"--input", options.input, false},
                            FileRole{"--reference", options.reference, false},
                            FileRole{"--replay", options.replay, false}};
  require_distinct(files);
  if (!options.record.empty() && options.input.empty() && options.reference.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "there is no file to take a record from",
                 .tensor = "--record",
                 .found = options.record,
                 .hint = "give --input or --reference, or leave out --record"});
  }
  if (!options.replay.empty() && options.routing == "file") {
    throw Error(ErrorCode::kInvalidArgument, {.what = "routing comes from one file",
                                              .tensor = "--replay",
                                              .expected = "--routing gate",
                                              .found = "--routing file"});
  }
  if (options.tolerance && !(std::isfinite(*options.tolerance) && *options.tolerance > 0)) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "the tolerance is not a positive number",
                                              .tensor = "--tolerance",
                                              .found = fmt::format("{}", *options.tolerance)});
  }
}

}  // namespace

void add_run_command(CommandLine& line) {
  Command command = line.add_command(
      "run", "Run the MoE layers of a model on hidden states, time them and check the results");
  auto options = std::make_shared<RunOptions>();
  add_model_argument(command, options->model_dir);
  add_layers_option(command, options->layers);
  add_expert_set_option(command, options->experts);
  add_extra_layers_option(command, options->extra_layers);
  const Option input =
      command.text("-i,--input", kFileValue, options->input,
                   "Hidden states: layers.N.hidden_states, or hidden_states for all");
  command.text("--record", "NAME", options->record,
               "Read layers.N.NAME.* of --input and --reference, where a file has several records");
  command
      .number("--random", "T", options->random_tokens, {0, int64_t{1} << 32},
              "Random hidden states of T tokens in the model's type (default: 16)")
      .excludes(input);
  command.seed(options->seed, "Seed of the random hidden states");
  add_rows_option(command, options->rows);
  add_adapter_option(command, options->adapter);
  command.choice("--routing", options->routing, {"gate", "file"},
                 "Route by the layer's gate, or as topk_ids or router_logits of --input say");
  add_choice_options(command, options->choices);
  command.text("-r,--reference", kFileValue, options->reference,
               "Expected layers.N.output, compared token by token");
  command.real("--tolerance", "X", options->tolerance,
               "Largest relative L2 error of a token (default: 5e-6 for f32, else 6e-3)");
  command
      .number("--sample", "N", options->sample, {1, 1 << 20},
              "Without --reference: tokens per layer checked against float64")
      .with_default();
  command.text("-o,--output", kFileValue, options->output,
               "Write output, topk_ids, topk_weights and router_logits of every layer");
  const Option trace =
      command.text("--trace", kFileValue, options->trace,
                   "Write the experts that each token chose in each layer, for conclave plan");
  command.flag("--trace-weights", options->trace_weights, "Write their weights too").needs(trace);
  command.text("--record-routing", kFileValue, options->record_routing,
               "Write the experts and weights of every token and layer, for --replay and compare");
  command.text("--replay", kFileValue, options->replay,
               "Route as a file of --record-routing says, by the tokens' rows");
  command
      .number("--repetitions", "N", options->repetitions, {1, 100000},
              "Timed forwards; the median counts")
      .with_default();
  command.flag("--check-manifest", options->check_manifest,
               "Verify the tensors read against what manifest has written");
  add_machine_options(command, options->machine);
  add_weights_option(command, options->machine);
  add_rank_options(command, options->ranks);
  add_format_option(command, options->printing);
  add_progress_option(command, options->printing);
  command.footer(
      "Examples:\n"
      "  conclave run ~/models/Qwen3-30B-A3B --layers 0-3 --random 64\n"
      "  conclave run testdata/qwen3-moe-tiny --input "
      "testdata/qwen3-moe-tiny/reference.safetensors\n"
      "      --reference testdata/qwen3-moe-tiny/reference.safetensors\n"
      "  conclave run ~/models/OLMoE-1B-7B-0924 --ranks 4 --transport mpi --tp 2\n"
      "  conclave run MODEL_DIR --input states.safetensors --trace routing.safetensors\n"
      "  conclave run MODEL_DIR --input states.safetensors --output out.safetensors --format json");
  command.on_run([options] {
    validate(*options);
    return run_on_ranks(options->ranks,
                        [&](RankTeam& team) { return RunCommand(*options, team).run(); });
  });
}

}  // namespace conclave::tool
