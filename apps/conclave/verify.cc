// conclave verify: checks every layer of a checkpoint against float64, stage by stage.
#include "checks.h"
#include "commands.h"
#include "input/adapter_option.h"
#include "input/batch.h"
#include "input/layer_selection.h"
#include "input/machine_options.h"
#include "input/shape_options.h"
#include "layer_table.h"
#include "ranks/run_on_ranks.h"
#include "ranks/split_layer.h"

#include "conclave/checkpoint.h"

#include <fmt/format.h>

#include <memory>
#include <optional>

namespace conclave::tool {
namespace {

struct VerifyOptions {
  std::string model_dir;
  std::string layers;
  std::string experts = "text";
  bool extra_layers = false;
  int64_t tokens = 32;
  uint64_t seed = 0;
  std::string rows;
  std::string adapter;
  bool check_manifest = false;
  MachineOptions machine;
  RankOptions ranks;
  OutputOptions printing;
};

struct VerifiedModel {
  const RankTeam& team;
  const Context& context;
  const Checkpoint& checkpoint;
  const AdapterOption& adapter;
};

LayerRow verify_layer(const VerifiedModel& model, const CheckpointLayer& info,
                      const VerifyOptions& options) {
  const auto& [team, context, checkpoint, adapters] = model;
  const BatchSource batches(
      {.input = "", .record = "", .random_tokens = options.tokens, .seed = options.seed});
  const Batch batch = batches.load(info.index, info.spec);
  const MoeSpec spec = with_rows(options.rows, info.spec, options.model_dir);
  const std::unique_ptr<WeightSource> source = checkpoint.layer_source(info.index);
  LayerInput input = batch.view();
  const std::optional<LoraAdapter> adapter = adapters.of_layer(info.index, checkpoint);
  if (adapter) input.adapter = &*adapter;
  const LayerRun result = run_split_layer(
      {.team = team,
       .context = context,
       .spec = spec,
       .source = *source,
       .options = adapters.with_room(layer_options(options.machine, options.tokens))},
      input, 0);

  LayerRow row;
  if (!team.leads()) return row;
  row.layer = info.index;
  row.spec = spec;
  row.tokens = options.tokens;
  row.work = layer_work(spec, row.tokens, result.expert_load);
  row.check = check_against_float64(context, spec, *source, input, result, options.tokens,
                                    accuracy_bar(spec.weight_dtype, batch.hidden.dtype()));
  return row;
}

ExitCode run_verify(const VerifyOptions& options, const RankTeam& team) {
  LayerTable table(team.out(), parse_output_format(options.printing.format),
                   LayerTable::Speeds::kHidden);
  const Checkpoint checkpoint =
      Checkpoint::open(options.model_dir, {.experts = parse_expert_set(options.experts),
                                           .extra_layers = options.extra_layers,
                                           .verify_manifest = options.check_manifest});
  const auto layers = select_layers(checkpoint, options.layers);
  const AdapterOption adapter(options.adapter);
  Console console(team.leads() ? options.printing.progress() : ProgressMode::kOff);
  const Context context = make_context(options.machine, &console, team);

  const MoeSpec spec = with_rows(options.rows, layers.front()->spec, options.model_dir);
  const Plan plan = make_plan(context, spec, layer_options(options.machine, 1), team.parallel());
  nlohmann::ordered_json facts = machine_facts(context);
  facts["device"] = plan.device;
  facts["isa"] = plan.isa;
  facts["arithmetic"] = plan.arithmetic;
  facts["model"] = options.model_dir;
  facts["model_type"] = checkpoint.model_type();
  add_facts(team, facts);
  std::vector<std::string> lines = {
      fmt::format("{}, {}", machine_line(context), compute_text(plan)),
      fmt::format("model: {}, {}, {} of {} MoE layers, {}", options.model_dir,
                  checkpoint.model_type(), layers.size(), checkpoint.layers().size(),
                  shape_text(spec)),
      fmt::format("check: {} random tokens per layer against float64 on the stored weights",
                  options.tokens)};
  if (adapter) {
    facts["adapter"] = options.adapter;
    lines.push_back("adapter: " + adapter.describe());
  }
  if (!team.alone()) lines.push_back("ranks: " + team.describe());
  table.writer().header(facts, lines);
  for (const CheckpointLayer* layer : layers) {
    console.subject(fmt::format("layer {}", layer->index));
    const LayerRow row = verify_layer({team, context, checkpoint, adapter}, *layer, options);
    console.clear();
    if (team.leads()) table.add(row);
    team.meet("check the layer");
  }
  if (!team.leads()) return ExitCode::kOk;
  return table.finish() ? ExitCode::kOk : ExitCode::kOutsideTolerance;
}

}  // namespace

void add_verify_command(CommandLine& line) {
  Command command = line.add_command(
      "verify", "Check every MoE layer of a model against float64 on the model's own weights");
  auto options = std::make_shared<VerifyOptions>();
  add_model_argument(command, options->model_dir);
  add_layers_option(command, options->layers);
  add_expert_set_option(command, options->experts);
  add_extra_layers_option(command, options->extra_layers);
  command
      .number("--tokens", "N", options->tokens, {1, 1 << 20},
              "Random tokens per layer, all of them checked")
      .with_default();
  command.seed(options->seed, "Seed of the random tokens");
  add_rows_option(command, options->rows);
  add_adapter_option(command, options->adapter);
  command.flag("--check-manifest", options->check_manifest,
               "Verify the tensors read against what manifest has written");
  add_machine_options(command, options->machine);
  add_rank_options(command, options->ranks);
  add_format_option(command, options->printing);
  add_progress_option(command, options->printing);
  command.footer(
      "Three stages are checked apart: the router logits against the gate product, the choice and\n"
      "weights of experts against those logits, and the output against that choice.\n\n"
      "Examples:\n"
      "  conclave verify ~/models/OLMoE-1B-7B-0924\n"
      "  conclave verify ~/models/Mixtral-8x7B-v0.1 --layers 0,31 --tokens 128\n"
      "  conclave verify ~/models/OLMoE-1B-7B-0924 --ranks 4 --transport mpi");
  command.on_run([options] {
    return run_on_ranks(options->ranks,
                        [&](const RankTeam& team) { return run_verify(*options, team); });
  });
}

}  // namespace conclave::tool
