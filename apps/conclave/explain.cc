// conclave explain: shows the plan of a layer, with every row that was considered.
#include "commands.h"
#include "input/layer_selection.h"
#include "input/machine_options.h"
#include "input/ranges.h"
#include "input/shape_options.h"
#include "output/numbers.h"

#include "conclave/checkpoint.h"
#include "conclave/error.h"
#include "conclave/layer.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace conclave::tool {
namespace {

constexpr int64_t kMostTokens = int64_t{1} << 32;

struct ExplainOptions {
  std::string model_dir;
  std::string layers;
  ShapeOptions shape;
  std::optional<int64_t> max_tokens;
  std::string tokens;
  bool json = false;
  MachineOptions machine;
};

struct Subject {
  std::string name;
  MoeSpec spec;
  // Only layers of a model have a source, which reads through the model.
  std::shared_ptr<const Checkpoint> checkpoint = {};
  std::shared_ptr<const WeightSource> source = {};
};

std::vector<Subject> subjects(const ExplainOptions& options) {
  std::vector<Subject> list;
  if (!options.model_dir.empty()) {
    refuse_shape_beside(options.model_dir, options.shape);
    const auto checkpoint = std::make_shared<const Checkpoint>(
        Checkpoint::open(options.model_dir, {.access = file_access(options.machine)}));
    for (const CheckpointLayer* layer : select_layers(*checkpoint, options.layers)) {
      list.push_back({.name = fmt::format("{} layer {}", options.model_dir, layer->index),
                      .spec = with_rows(options.shape.rows, layer->spec, options.model_dir),
                      .checkpoint = checkpoint,
                      .source = checkpoint->layer_source(layer->index)});
    }
    return list;
  }
  if (options.shape.models.empty() && !any_size_given(options.shape)) {
    throw Error(ErrorCode::kInvalidArgument,
                ErrorDetail{.what = "nothing to explain",
                            .expected = "MODEL_DIR, or --model, or -E, -k, -H and -I"});
  }
  for (const NamedShape& shape : resolve_shapes(options.shape)) {
    list.push_back({.name = shape.name, .spec = shape.spec});
  }
  return list;
}

// The kernel, tile and memory that serve one call.
struct CallPlan {
  int64_t tokens = 0;
  int64_t chunks = 0;
  std::string kernel;
  std::string tile;
  size_t workspace_bytes = 0;
};

std::string chosen_kernel(const Plan& plan) {
  const auto row = std::find_if(plan.rows.begin(), plan.rows.end(), [](const PlanRow& candidate) {
    return candidate.table == "kernel" && candidate.chosen;
  });
  return row == plan.rows.end() ? "" : row->name;
}

// A call longer than the plan runs in equal chunks, so the largest chunk decides.
CallPlan plan_of_call(const Plan& plan, int64_t tokens) {
  CallPlan call{.tokens = tokens,
                .chunks = (tokens + plan.max_tokens - 1) / plan.max_tokens,
                .kernel = chosen_kernel(plan),
                .tile = plan.tile,
                .workspace_bytes = plan.workspace_bytes};
  const int64_t largest = (tokens + call.chunks - 1) / call.chunks;
  for (const PlanRung& rung : plan.ladder) {
    if (largest < rung.first_tokens || largest > rung.last_tokens) continue;
    call.kernel = rung.kernel;
    call.tile = rung.tile;
    call.workspace_bytes = rung.workspace_bytes;
  }
  return call;
}

std::string call_text(const CallPlan& call) {
  const std::string tile = call.tile.empty() ? "" : fmt::format(", tile {}", call.tile);
  const std::string cut = call.chunks == 1 ? "" : fmt::format(", in {} equal chunks", call.chunks);
  return fmt::format("call of {}: {}{}, workspace {}{}\n", call.tokens, call.kernel, tile,
                     binary_bytes_text(call.workspace_bytes), cut);
}

nlohmann::ordered_json plan_json(const Subject& subject, const Plan& plan,
                                 const std::vector<int64_t>& tokens) {
  nlohmann::ordered_json json = {{"name", subject.name},
                                 {"shape", shape_text(subject.spec)},
                                 {"isa", plan.isa},
                                 {"arithmetic", plan.arithmetic},
                                 {"determinism", plan.determinism},
                                 {"tile", plan.tile},
                                 {"stages", plan.stages},
                                 {"router", plan.router},
                                 {"dispatcher", plan.dispatcher},
                                 {"max_tokens", plan.max_tokens},
                                 {"num_local_experts", plan.num_local_experts},
                                 {"workspace_bytes", plan.workspace_bytes},
                                 {"packed_bytes", plan.packed_bytes},
                                 {"in_place_bytes", plan.in_place_bytes},
                                 {"packed_layout", plan.packed_layout}};
  json["buffers"] = nlohmann::ordered_json::array();
  for (const PlanBuffer& buffer : plan.buffers) {
    json["buffers"].push_back({{"name", buffer.name},
                               {"bytes", buffer.bytes},
                               {"first_stage", buffer.first_stage},
                               {"last_stage", buffer.last_stage}});
  }
  json["rows"] = nlohmann::ordered_json::array();
  for (const PlanRow& row : plan.rows) {
    json["rows"].push_back(
        {{"table", row.table}, {"name", row.name}, {"chosen", row.chosen}, {"reason", row.reason}});
  }
  if (!tokens.empty()) json["calls"] = nlohmann::ordered_json::array();
  for (const int64_t count : tokens) {
    const CallPlan call = plan_of_call(plan, count);
    json["calls"].push_back({{"tokens", call.tokens},
                             {"chunks", call.chunks},
                             {"kernel", call.kernel},
                             {"tile", call.tile},
                             {"workspace_bytes", call.workspace_bytes}});
  }
  return json;
}

int64_t planned_tokens(const ExplainOptions& options, const std::vector<int64_t>& tokens) {
  if (options.max_tokens) return *options.max_tokens;
  int64_t most = LayerOptions().max_tokens;
  for (const int64_t count : tokens) most = std::max(most, count);
  return most;
}

ExitCode run_explain(const ExplainOptions& options) {
  const std::vector<Subject> list = subjects(options);
  const Context context = make_context(options.machine, nullptr);
  std::vector<int64_t> tokens;
  if (!options.tokens.empty()) {
    tokens = parse_number_list(options.tokens,
                               {.option = "--tokens", .lowest = 1, .highest = kMostTokens});
  }
  const LayerOptions planned = layer_options(options.machine, planned_tokens(options, tokens));
  nlohmann::ordered_json document = nlohmann::ordered_json::array();
  if (!options.json) fmt::print("{}\n", machine_line(context));
  for (const Subject& subject : list) {
    const Plan plan = make_plan(context, subject.spec, planned, {}, subject.source.get());
    if (options.json) {
      document.push_back(plan_json(subject, plan, tokens));
      continue;
    }
    const std::string text = explain(plan);
    fmt::print("\n{}: {}\n{}{}", subject.name, shape_text(subject.spec), text,
               text.ends_with('\n') ? "" : "\n");
    for (const int64_t count : tokens) fmt::print("{}", call_text(plan_of_call(plan, count)));
  }
  if (options.json) fmt::print("{}\n", json_text(document, 2));
  return ExitCode::kOk;
}

}  // namespace

void add_explain_command(CommandLine& line) {
  Command command = line.add_command(
      "explain", "Show the plan of a layer: every kernel, chosen or rejected and why, and memory");
  auto options = std::make_shared<ExplainOptions>();
  const Option model_dir =
      command.positional(kModelDir, options->model_dir,
                         "Explain the layers of this model: a directory, or a GGUF file");
  command.text("-l,--layers", "LIST", options->layers, "Layers such as 0-3,7 (default: all)")
      .needs(model_dir);
  add_model_option(command, options->shape, "");
  add_shape_options(command, options->shape, TypesOf::kAnyFile);
  add_rows_option(command, options->shape.rows);
  command.number("--max-tokens", "T", options->max_tokens, {1, kMostTokens},
                 "Tokens to plan for (default: the largest of --tokens, at least 4096)");
  command.text("--tokens", "LIST", options->tokens,
               "Also what serves calls of so many tokens: 1,64,4096 or 1-4096*4");
  command.flag("--json", options->json, "Print JSON");
  add_machine_options(command, options->machine);
  add_weights_option(command, options->machine);
  command.footer(
      "Examples:\n"
      "  conclave explain ~/models/Qwen3-30B-A3B --layers 0\n"
      "  conclave explain --model qwen3-30b-a3b --isa avx2\n"
      "  conclave explain -E 64 -k 6 -H 2048 -I 1408 --dtype f16");
  command.on_run([options] { return run_explain(*options); });
}

}  // namespace conclave::tool
