// conclave plan: compares the ways to split a model's layers over a cluster, without running it.
#include "commands.h"
#include "input/file_roles.h"
#include "input/layer_selection.h"
#include "input/machine_options.h"
#include "input/ranges.h"
#include "input/shape_options.h"
#include "output/durable_file.h"
#include "output/numbers.h"
#include "plan/page.h"
#include "plan/planner.h"
#include "plan/report.h"
#include "trace/synthetic_trace.h"
#include "trace/trace_file.h"

#include "conclave/checkpoint.h"
#include "conclave/error.h"
#include "conclave/synthetic.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::tool {
namespace {

constexpr int64_t kMostGpuTokens = int64_t{1} << 20;
constexpr int64_t kMostDrawnTokens = int64_t{1} << 22;
constexpr int64_t kMostPlannedLayers = 4096;
// Drawn layers differ by chance only: more of them say nothing new.
constexpr size_t kDrawnLayers = 8;

struct PlanOptions {
  std::string model_dir;
  std::string layers;
  ShapeOptions shape;
  std::optional<int64_t> moe_layers;
  std::string cluster;
  std::string trace;
  std::string routing = "uniform";
  int64_t trace_tokens = 32768;
  std::optional<double> correlation;
  uint64_t seed = 0;
  std::string write_trace;
  std::string tokens = "1,128,4096";
  std::string dispatch;
  std::string combine = "per-rank";
  std::string reserve;
  int64_t top = 8;
  std::string json;
  std::string html;
  OutputOptions printing;
};

PlannedModel model_of_directory(const PlanOptions& options) {
  refuse_shape_beside(options.model_dir, options.shape);
  const Checkpoint checkpoint = Checkpoint::open(options.model_dir);
  PlannedModel model{
      .name = options.model_dir, .model_type = checkpoint.model_type(), .layers = {}};
  uint64_t bytes = 0;
  for (const CheckpointLayer* layer : select_layers(checkpoint, options.layers)) {
    const MoeSpec spec = with_rows(options.shape.rows, layer->spec, options.model_dir);
    model.layers.push_back({.index = layer->index,
                            .spec = spec,
                            .bytes = layer_bytes(spec, *checkpoint.layer_source(layer->index))});
  }
  for (const CheckpointLayer& layer : checkpoint.layers()) bytes += layer.bytes;
  model.other_bytes =
      static_cast<double>(checkpoint.total_bytes() - std::min(bytes, checkpoint.total_bytes()));
  return model;
}

PlannedModel model_of_sizes(const PlanOptions& options) {
  if (options.shape.models.empty() && !any_size_given(options.shape)) {
    throw Error(ErrorCode::kInvalidArgument,
                ErrorDetail{.what = "no model to plan for",
                            .expected = "MODEL_DIR, or --model, or -E, -k, -H and -I"});
  }
  const std::vector<NamedShape> shapes = resolve_shapes(options.shape);
  if (shapes.size() != 1) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "a plan is for one model",
                                              .tensor = "--model",
                                              .expected = "one preset",
                                              .found = options.shape.models});
  }
  const NamedShape& shape = shapes.front();
  PlannedModel model{.name = shape.name, .model_type = shape.model_type, .layers = {}};
  const LayerBytes bytes = layer_bytes(shape.spec, *make_synthetic_source(shape.spec, 0));
  const int64_t count = options.moe_layers.value_or(shape.num_layers);
  for (int64_t layer = 0; layer < count; ++layer) {
    model.layers.push_back({.index = layer, .spec = shape.spec, .bytes = bytes});
  }
  return model;
}

TraceInfo drawn_trace(const PlannedModel& model, int64_t tokens) {
  TraceInfo info{.model = model.name,
                 .model_type = model.model_type,
                 .num_experts = model.spec().num_experts,
                 .num_zero_experts = model.spec().num_zero_experts,
                 .top_k = model.spec().top_k,
                 .num_tokens = tokens,
                 .layers = {},
                 .batch_begin = {}};
  // They are spread over the model, whose layers may differ in size.
  const size_t layers = std::min(model.layers.size(), kDrawnLayers);
  for (size_t i = 0; i < layers; ++i) {
    info.layers.push_back(model.layers[i * model.layers.size() / layers].index);
  }
  return info;
}

std::unique_ptr<RoutingTrace> trace_of(const PlanOptions& options, const PlannedModel& model) {
  if (!options.trace.empty()) {
    return std::make_unique<TraceFile>(TraceFile::open(options.trace));
  }
  return std::make_unique<SyntheticTrace>(
      drawn_trace(model, options.trace_tokens),
      SyntheticTraceOptions{.choice = parse_trace_choice(options.routing),
                            .text = options.routing,
                            .seed = options.seed,
                            .correlation = options.correlation.value_or(0)});
}

void write_trace(const std::string& path, const RoutingTrace& trace) {
  TraceWriter writer(path, trace.info(), TraceWeights::kNo);
  for (size_t i = 0; i < trace.info().layers.size(); ++i) {
    std::vector<int32_t> ids = trace.ids(i);
    writer.write({ids.data(), DType::kI32, {trace.info().num_tokens, trace.info().top_k}}, {});
  }
  writer.finish();
}

// A list of numbers that the word for the trace's own batches may precede.
std::vector<int64_t> tokens_of(const std::string& text) {
  constexpr std::string_view kOfTrace = "trace";
  std::vector<int64_t> list;
  std::string_view numbers = text;
  if (numbers.starts_with(kOfTrace)) {
    list.push_back(kBatchesOfTrace);
    numbers.remove_prefix(kOfTrace.size());
    if (numbers.empty()) return list;
    if (numbers.starts_with(',')) numbers.remove_prefix(1);
  }
  const ListLimits limits{.option = "--tokens", .lowest = 1, .highest = kMostGpuTokens};
  for (const int64_t tokens : parse_number_list(numbers, limits)) {
    if (std::ranges::find(list, tokens) == list.end()) list.push_back(tokens);
  }
  return list;
}

PlanRequest request_of(const PlanOptions& options, const MoeSpec& spec) {
  PlanRequest request{.cluster = parse_cluster(options.cluster),
                      .tokens = tokens_of(options.tokens)};
  const bool bytes = options.dispatch.empty() ? product_kind(spec) == ProductKind::kBytes
                                              : options.dispatch == "e4m3";
  request.dispatch_bits = bytes ? 8 : 16;
  if (options.combine == "unreduced") request.combine = EpCombine::kUnreduced;
  if (options.combine == "rounded") request.combine = EpCombine::kRoundedPerRank;
  if (!options.reserve.empty()) {
    request.reserve_bytes = static_cast<double>(parse_byte_size(options.reserve, "--reserve"));
  }
  return request;
}

ExitCode run_plan(const PlanOptions& options) {
  const OutputFormat format = parse_output_format(options.printing.format);
  const std::array files = {FileRole{"--trace", options.trace, false},
                            FileRole{"--write-trace", options.write_trace, true},
                            FileRole{"--json", options.json, true},
                            FileRole{"--html", options.html, true}};
  require_distinct(files);
  const PlannedModel model =
      options.model_dir.empty() ? model_of_sizes(options) : model_of_directory(options);
  const PlanRequest request = request_of(options, model.spec());
  const std::unique_ptr<RoutingTrace> trace = trace_of(options, model);
  if (!options.write_trace.empty()) write_trace(options.write_trace, *trace);
  Console console(options.printing.progress());
  const ClusterPlan plan = plan_cluster(model, *trace, request, [&](int64_t done, int64_t all) {
    console.progress("planning layers", done, all);
  });
  console.clear();
  if (!options.json.empty()) {
    write_durably(options.json, json_text(plan_json(model, plan), 1) + "\n");
  }
  if (!options.html.empty()) write_durably(options.html, plan_page(model, plan));
  print_plan(model, plan, format, options.top, stdout);
  return ExitCode::kOk;
}

}  // namespace

void add_plan_command(CommandLine& line) {
  Command command = line.add_command(
      "plan", "Compare the ways to split a model over a cluster: memory, balance, bytes, time");
  auto options = std::make_shared<PlanOptions>();
  const Option model_dir = command.positional(kModelDir, options->model_dir,
                                              "Plan for this model: a directory, or a GGUF file");
  command.text("-l,--layers", "LIST", options->layers, "Layers such as 0-3,7 (default: all)")
      .needs(model_dir);
  add_model_option(command, options->shape, "");
  add_shape_options(command, options->shape, TypesOf::kAnyFile);
  add_rows_option(command, options->shape.rows);
  command
      .number("--moe-layers", "N", options->moe_layers, {1, kMostPlannedLayers},
              "MoE layers of a model given by sizes (default: the preset's, or 1)")
      .excludes(model_dir);
  command
      .text("-c,--cluster", "SPEC", options->cluster,
            "[NODESx]GPUS:KIND with KIND h200, h100 or custom and ,key=value for other rates, or a "
            ".json file: 8:h200, 16x8:h200,network_gbps=45")
      .required();
  const Option trace = command.text("--trace", kFileValue, options->trace,
                                    "Choices that conclave run --trace has written");
  command
      .text("--routing", "RULE", options->routing,
            "Without --trace: uniform, zipf:X, one (all tokens on the same k experts), or "
            "hot:N:SHARE (N experts have that share of the choices)")
      .with_default()
      .excludes(trace);
  command
      .number("--trace-tokens", "T", options->trace_tokens, {1, kMostDrawnTokens}, "Tokens to draw")
      .with_default()
      .excludes(trace);
  command
      .real("--correlation", "X", options->correlation,
            "Chance that a drawn choice is that of the token before, 0 to below 1 (default: 0)")
      .excludes(trace);
  command.seed(options->seed, "Seed of the drawn choices").excludes(trace);
  command.text("--write-trace", kFileValue, options->write_trace,
               "Write the choices as conclave run --trace does");
  command
      .text(
          "-T,--tokens", "LIST", options->tokens,
          "Tokens that each GPU brings to a layer: 1,128 or 1-4096*4; trace: as many as each batch "
          "of the trace has, over all GPUs of a group")
      .with_default();
  command.choice("--dispatch", options->dispatch, {"bf16", "e4m3"},
                 "Rows on their way to experts (default: e4m3 beside 8-bit rows and weights, else "
                 "bf16)");
  command
      .choice("--combine", options->combine, {"per-rank", "rounded", "unreduced"},
              "How rows come home: added up on each rank in float32, such sums rounded to 16 bits, "
              "or one by one")
      .with_default();
  command.text("--reserve", "SIZE", options->reserve,
               "Memory of each GPU for caches and all that is not counted, such as 40GB");
  command
      .number("--top", "N", options->top, {1, 1 << 20},
              "Rows of the table for each number of tokens")
      .with_default();
  command.text("--json", kFileValue, options->json, "Write everything as JSON");
  command.text("--html", kFileValue, options->html, "Write a page with heat maps and charts");
  add_format_option(command, options->printing);
  add_progress_option(command, options->printing);
  command.footer(
      "Times are predictions, fitted to measured kernels and collectives; the table says how "
      "well.\n"
      "\n"
      "Examples:\n"
      "  conclave plan --model qwen3-235b-a22b --cluster 8:h200\n"
      "  conclave plan ~/models/Qwen3-30B-A3B --cluster 2x8:h200 --trace routing.safetensors\n"
      "      --html plan.html\n"
      "  conclave plan -E 256 -k 8 -H 7168 -I 2048 --shared 2048 --dtype fp8-block --moe-layers "
      "58\n"
      "      --cluster 32x8:h200 --routing zipf:0.6 --tokens 64,4096");
  command.on_run([options] { return run_plan(*options); });
}

}  // namespace conclave::tool
