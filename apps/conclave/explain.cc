// conclave explain: the plan of a layer, with every row that was considered.
#include "commands.h"
#include "input/layer_selection.h"
#include "input/machine_options.h"
#include "input/shape_options.h"
#include "output/numbers.h"

#include "conclave/checkpoint.h"
#include "conclave/error.h"
#include "conclave/layer.h"

#include <fmt/format.h>

#include <memory>
#include <string>

namespace conclave::tool {
namespace {

struct ExplainOptions {
  std::string model_dir;
  std::string layers;
  ShapeOptions shape;
  int64_t max_tokens = 4096;
  bool json = false;
  MachineOptions machine;
};

struct Subject {
  std::string name;
  MoeSpec spec;
};

std::vector<Subject> subjects(const ExplainOptions& options) {
  std::vector<Subject> list;
  if (!options.model_dir.empty()) {
    const Checkpoint checkpoint = Checkpoint::open(options.model_dir);
    for (const CheckpointLayer* layer : select_layers(checkpoint, options.layers)) {
      list.push_back({fmt::format("{} layer {}", options.model_dir, layer->index), layer->spec});
    }
    return list;
  }
  if (options.shape.models.empty() && !any_size_given(options.shape)) {
    throw Error(ErrorCode::kInvalidArgument,
                ErrorDetail{.what = "nothing to explain",
                            .expected = "MODEL_DIR, or --model, or -E, -k, -H and -I"});
  }
  for (const NamedShape& shape : resolve_shapes(options.shape)) {
    list.push_back({shape.name, shape.spec});
  }
  return list;
}

nlohmann::ordered_json plan_json(const Subject& subject, const Plan& plan) {
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
                                 {"packed_layout", plan.packed_layout}};
  json["rows"] = nlohmann::ordered_json::array();
  for (const PlanRow& row : plan.rows) {
    json["rows"].push_back(
        {{"table", row.table}, {"name", row.name}, {"chosen", row.chosen}, {"reason", row.reason}});
  }
  return json;
}

ExitCode run_explain(const ExplainOptions& options) {
  const std::vector<Subject> list = subjects(options);
  const Context context = make_context(options.machine, nullptr);
  const LayerOptions planned = layer_options(options.machine, options.max_tokens);
  nlohmann::ordered_json document = nlohmann::ordered_json::array();
  if (!options.json) fmt::print("{}\n", machine_line(context));
  for (const Subject& subject : list) {
    const Plan plan = make_plan(context, subject.spec, planned);
    if (options.json) {
      document.push_back(plan_json(subject, plan));
      continue;
    }
    const std::string text = explain(plan);
    fmt::print("\n{}: {}\n{}{}", subject.name, shape_text(subject.spec), text,
               text.ends_with('\n') ? "" : "\n");
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
      command.positional(kModelDir, options->model_dir, "Explain the layers of this model");
  command.text("-l,--layers", "LIST", options->layers, "Layers such as 0-3,7 (default: all)")
      .needs(model_dir);
  add_model_option(command, options->shape, "");
  add_shape_options(command, options->shape);
  command
      .number("--max-tokens", "T", options->max_tokens, {1, int64_t{1} << 32}, "Tokens to plan for")
      .with_default();
  command.flag("--json", options->json, "Print JSON");
  add_machine_options(command, options->machine);
  command.footer(
      "Examples:\n"
      "  conclave explain ~/models/Qwen3-30B-A3B --layers 0\n"
      "  conclave explain --model qwen3-30b-a3b --isa avx2\n"
      "  conclave explain -E 64 -k 6 -H 2048 -I 1408 --dtype f16");
  command.on_run([options] { return run_explain(*options); });
}

}  // namespace conclave::tool
