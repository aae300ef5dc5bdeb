// conclave inspect: shows the geometry of every MoE layer of a checkpoint.
#include "commands.h"
#include "input/layer_selection.h"
#include "input/machine_options.h"
#include "output/numbers.h"
#include "spec_text.h"
#include "value_types.h"

#include "conclave/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>

namespace conclave::tool {
namespace {

struct InspectOptions {
  std::string model_dir;
  std::string experts = "text";
  bool extra_layers = false;
  bool json = false;
  OutputOptions printing;
};

// The width of a column of words is that of its longest text; all layers are known at the start.
template <class Text>
int widest(const Checkpoint& checkpoint, int least, const Text& text) {
  int width = least;
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    width = std::max(width, static_cast<int>(text(layer).size()));
  }
  return width;
}

// Bytes of the experts' matrices that a layer could read in the mapped files.
uint64_t in_place_bytes(const Checkpoint& checkpoint, int64_t layer) {
  const std::unique_ptr<WeightSource> source = checkpoint.layer_source(layer);
  uint64_t bytes = 0;
  for (const WeightId id : weights::kAll) {
    if (!id.mlp() || id.plane() != WeightPlane::kWeights) continue;
    const WeightInfo info = source->describe(id);
    if (!holds_values(info.dtype)) continue;
    for (int64_t expert = 0; expert < info.count; ++expert) {
      const ConstTensorView view = source->view(id, expert);
      if (!view.empty()) bytes += dense_bytes(view.dtype, view.shape);
    }
  }
  return bytes;
}

std::vector<Column> columns(const Checkpoint& checkpoint) {
  using Layer = CheckpointLayer;
  const auto width = [&](int least, const auto& text) { return widest(checkpoint, least, text); };
  const int router = width(6, [](const Layer& layer) { return router_text(layer.spec.router); });
  const int activation = width(4, [](const Layer& layer) { return layer.spec.activation.name; });
  const int shared = width(6, [](const Layer& layer) { return shared_text(layer.spec.shared); });
  const int weights = width(4, [](const Layer& layer) { return weights_text(layer.spec); });
  const int parts = width(5, [](const Layer& layer) { return parts_text(layer.spec); });
  const int layout = width(10, [](const Layer& layer) { return layer.layout; });
  return {{"layer", "layer", 5, Align::kRight},
          {"num_experts", "E", 4, Align::kRight},
          {"top_k", "k", 3, Align::kRight},
          {"hidden_size", "H", 5, Align::kRight},
          {"intermediate_size", "I", 5, Align::kRight},
          {"weight_dtype", "", 0, Align::kLeft},
          {"weights", "type", weights, Align::kLeft},
          {"router", "router", router, Align::kLeft},
          {"renormalize", "", 0, Align::kLeft},
          {"logits_dtype", "logits", 6, Align::kLeft},
          {"activation", "act", activation, Align::kLeft},
          {"shared_mode", "", 0, Align::kLeft},
          {"shared_size", "shared", shared, Align::kRight},
          {"shared_count", "", 0, Align::kLeft},
          {"num_zero_experts", "", 0, Align::kLeft},
          {"latent_size", "", 0, Align::kLeft},
          {"residual_size", "", 0, Align::kLeft},
          {"has_bias", "", 0, Align::kLeft},
          {"has_output_bias", "", 0, Align::kLeft},
          {"weight_on", "", 0, Align::kLeft},
          {"output_scale", "", 0, Align::kLeft},
          {"", "parts", parts, Align::kLeft},
          {"layout", "layout", layout, Align::kLeft},
          {"bytes", "bytes", 8, Align::kRight},
          {"in_place_bytes", "in place", 8, Align::kRight},
          {"parameters", "params", 7, Align::kRight},
          {"active_parameters", "active", 7, Align::kRight},
          {"prefix", "", 0, Align::kLeft},
          {"supported", "runs", 4, Align::kLeft},
          {"reason", "", 0, Align::kLeft}};
}

std::vector<Cell> cells(const Checkpoint& checkpoint, const CheckpointLayer& layer) {
  const MoeSpec& spec = layer.spec;
  const bool runs = static_cast<bool>(layer.support);
  const uint64_t in_place = in_place_bytes(checkpoint, layer.index);
  return {integer_cell(layer.index),
          integer_cell(spec.num_experts),
          integer_cell(spec.top_k),
          integer_cell(spec.hidden_size),
          integer_cell(spec.intermediate_size),
          text_cell(std::string(to_string(spec.weight_dtype))),
          text_cell(weights_text(spec)),
          {spec.router.name, router_text(spec.router)},
          text_cell(std::string(renormalize_name(spec.router.renormalize))),
          text_cell(std::string(to_string(spec.router.logits_dtype))),
          text_cell(spec.activation.name),
          text_cell(std::string(shared_mode_name(spec.shared.mode))),
          {spec.shared.intermediate_size, shared_text(spec.shared)},
          integer_cell(spec.shared.count),
          integer_cell(spec.num_zero_experts),
          integer_cell(spec.latent.size),
          integer_cell(spec.residual.intermediate_size),
          {spec.has_bias, spec.has_bias ? "yes" : "no"},
          {spec.has_output_bias, spec.has_output_bias ? "yes" : "no"},
          text_cell(spec.weight_on == WeightOn::kInput ? "input" : "output"),
          {spec.output_scale, fmt::format("{:g}", spec.output_scale)},
          text_cell(parts_text(spec)),
          text_cell(layer.layout),
          {layer.bytes, bytes_text(layer.bytes)},
          {in_place, in_place == 0 ? "no" : bytes_text(in_place)},
          {layer.parameters.total, count_text(static_cast<uint64_t>(layer.parameters.total))},
          {layer.parameters.active, count_text(static_cast<uint64_t>(layer.parameters.active))},
          text_cell(layer.prefix),
          {runs, runs ? "yes" : "no", runs ? Style::kGood : Style::kBad},
          runs ? absent_cell() : text_cell(layer.support.reason())};
}

struct Totals {
  uint64_t moe_parameters = 0;
  uint64_t moe_active = 0;
  uint64_t moe_bytes = 0;
};

Totals sum(const Checkpoint& checkpoint) {
  Totals totals;
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    totals.moe_parameters += static_cast<uint64_t>(layer.parameters.total);
    totals.moe_active += static_cast<uint64_t>(layer.parameters.active);
    totals.moe_bytes += layer.bytes;
  }
  return totals;
}

// Every token uses the rest of the model.
uint64_t active_parameters(const Checkpoint& checkpoint, const Totals& totals) {
  const uint64_t rest = checkpoint.total_parameters() -
                        std::min(checkpoint.total_parameters(), totals.moe_parameters);
  return rest + totals.moe_active;
}

// Returns "61 layers and 1 extra".
std::string layers_text(const Checkpoint& checkpoint) {
  const auto layers = checkpoint.layers();
  const int64_t count = checkpoint.num_hidden_layers();
  const auto extra = std::count_if(layers.begin(), layers.end(), [&](const CheckpointLayer& layer) {
    return layer.index >= count;
  });
  return extra == 0 ? fmt::format("{} layers", count)
                    : fmt::format("{} layers and {} extra", count, extra);
}

nlohmann::ordered_json facts(const Checkpoint& checkpoint, const Totals& totals) {
  nlohmann::ordered_json json = {{"model", checkpoint.directory().string()},
                                 {"model_type", checkpoint.model_type()},
                                 {"architecture", checkpoint.architecture()},
                                 {"num_hidden_layers", checkpoint.num_hidden_layers()},
                                 {"num_moe_layers", checkpoint.layers().size()},
                                 {"total_bytes", checkpoint.total_bytes()},
                                 {"total_parameters", checkpoint.total_parameters()},
                                 {"active_parameters", active_parameters(checkpoint, totals)},
                                 {"moe_bytes", totals.moe_bytes},
                                 {"moe_parameters", totals.moe_parameters},
                                 {"moe_active_parameters", totals.moe_active}};
  json["notes"] = nlohmann::ordered_json::array();
  for (const std::string& note : checkpoint.notes()) json["notes"].push_back(note);
  return json;
}

ExitCode run_inspect(const InspectOptions& options) {
  const OutputFormat format =
      options.json ? OutputFormat::kJson : parse_output_format(options.printing.format);
  const Checkpoint checkpoint =
      Checkpoint::open(options.model_dir, {.access = FileAccess::kMap,
                                           .experts = parse_expert_set(options.experts),
                                           .extra_layers = options.extra_layers});
  const Totals totals = sum(checkpoint);
  TableWriter table(stdout, format, columns(checkpoint));
  table.header(facts(checkpoint, totals),
               {fmt::format("model: {}", checkpoint.directory().string()),
                fmt::format("type: {}; {}, {} of them MoE", checkpoint.model_type(),
                            layers_text(checkpoint), checkpoint.layers().size()),
                fmt::format("parameters: {} in all, {} active per token; {} on disk",
                            count_text(checkpoint.total_parameters()),
                            count_text(active_parameters(checkpoint, totals)),
                            bytes_text(checkpoint.total_bytes())),
                fmt::format("MoE layers: {} parameters, {} active per token; {} on disk",
                            count_text(totals.moe_parameters), count_text(totals.moe_active),
                            bytes_text(totals.moe_bytes))});
  for (const CheckpointLayer& layer : checkpoint.layers()) table.row(cells(checkpoint, layer));
  table.note("");
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    if (!layer.support) {
      table.note(fmt::format("layer {} cannot run: {}", layer.index, layer.support.reason()));
    }
  }
  for (const std::string& note : checkpoint.notes()) table.note("note: " + note);
  table.finish("layers");
  return ExitCode::kOk;
}

}  // namespace

void add_inspect_command(CommandLine& line) {
  Command command = line.add_command(
      "inspect", "Show the geometry of every MoE layer, the totals, and what cannot run and why");
  auto options = std::make_shared<InspectOptions>();
  add_model_argument(command, options->model_dir);
  add_expert_set_option(command, options->experts);
  add_extra_layers_option(command, options->extra_layers);
  command.flag("--json", options->json, "The same as --format json");
  add_format_option(command, options->printing);
  command.footer(
      "Only headers are read, so it is quick for any size.\n\n"
      "Examples:\n"
      "  conclave inspect ~/models/Mixtral-8x7B-v0.1\n"
      "  conclave inspect MODEL_DIR --json | jq .total_parameters");
  command.on_run([options] { return run_inspect(*options); });
}

}  // namespace conclave::tool
