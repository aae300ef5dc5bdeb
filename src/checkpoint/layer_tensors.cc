#include "checkpoint/layer_tensors.h"

#include "checkpoint/coded_values.h"
#include "checkpoint/layer_names.h"
#include "checkpoint/layer_parts.h"
#include "checkpoint/methods/config.h"
#include "checkpoint/name_list.h"
#include "checkpoint/scale_names.h"
#include "checkpoint/stored_planes.h"
#include "checkpoint/tensor_name.h"
#include "core/shared_facts.h"
#include "core/weight_types.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

// Trunks seen in published models, the most usual first.
constexpr std::array<std::string_view, 9> kKnownTrunks = {
    "model.",          "model.language_model.", "language_model.model.",
    "language_model.", "thinker.model.",        "model.llm.",
    "backbone.",       "transformer.",          ""};

// No model has more; this keeps the work on hostile names small.
constexpr int64_t kMaxExtraLayers = 64;

// Fragments of the names of everything around the MoE blocks, for any family.
constexpr std::array<std::string_view, 20> kOtherParts = {
    "attn",    "attention",   "norm", "embed",      "lm_head", "mlp",     "feed_forward",
    "ffn",     "rotary",      "rope", "visual",     "vision",  "audio",   "projector",
    "eh_proj", "shared_head", "conv", "classifier", "score",   "residual"};

bool is_known_part(std::string_view name) {
  return std::any_of(kOtherParts.begin(), kOtherParts.end(), [&](std::string_view part) {
    return name.find(part) != std::string_view::npos;
  });
}

// Multi-token-prediction heads hold layers of their own that no forward pass of the model needs.
bool is_prediction_head(std::string_view name) {
  return name.starts_with("mtp.") || name.find(".mtp.") != std::string_view::npos;
}

bool is_other_part(const Architecture& architecture, std::string_view name) {
  return std::any_of(architecture.skipped.begin(), architecture.skipped.end(),
                     [&](std::string_view start) { return name.starts_with(start); });
}

using TrunkCounts = std::map<std::string_view, int64_t>;

std::string choose_trunk(const TrunkCounts& experts, const TrunkCounts& layers) {
  // If there are no experts, the trunk only serves the message that says so.
  const TrunkCounts& counts = experts.empty() ? layers : experts;
  for (std::string_view trunk : kKnownTrunks) {
    if (counts.contains(trunk)) return std::string(trunk);
  }
  const auto most =
      std::max_element(counts.begin(), counts.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  return std::string(most == counts.end() ? kKnownTrunks.front() : most->first);
}

// Counts of the tensors that are not read, for the notes.
struct Skipped {
  int64_t prediction_head = 0;
  int64_t beyond_layers = 0;
  int64_t other_part = 0;
  std::vector<std::string> unknown;

  std::vector<std::string> notes(int64_t num_hidden_layers) const {
    std::vector<std::string> texts;
    if (prediction_head > 0) {
      texts.push_back(fmt::format(
          "{} tensors of a multi-token-prediction head (mtp.*) are not read", prediction_head));
    }
    if (beyond_layers > 0) {
      texts.push_back(
          fmt::format("{} tensors of layers from num_hidden_layers = {} on are not read",
                      beyond_layers, num_hidden_layers));
    }
    if (other_part > 0) {
      texts.push_back(fmt::format(
          "{} tensors of a part with experts and a configuration of its own are not read",
          other_part));
    }
    if (!unknown.empty()) {
      texts.push_back(fmt::format("{} tensors outside the MoE blocks belong to no known part: {}",
                                  unknown.size(), first_few(unknown, 3)));
    }
    return texts;
  }
};

// The tensor's extra layer, if it has one. A head numbers its layers from 0.
struct ExtraName {
  int64_t layer = 0;  // num_hidden_layers or more
  LayerName name;
};

std::optional<ExtraName> split_extra_name(const ModelConfig& config, std::string_view trunk,
                                          std::string_view tensor) {
  const Architecture& architecture = *config.architecture;
  if (is_other_part(architecture, tensor)) return std::nullopt;
  const std::optional<LayerName> name = split_layer_name(tensor, architecture.layers);
  if (!name) return std::nullopt;
  const bool in_head = is_prediction_head(tensor);
  if (in_head ? !name->trunk.ends_with("mtp.") : name->trunk != trunk) return std::nullopt;
  const int64_t number = in_head ? name->layer : name->layer - config.num_hidden_layers;
  if (number < 0 || number >= kMaxExtraLayers) return std::nullopt;
  return ExtraName{.layer = config.num_hidden_layers + number, .name = *name};
}

// Codes go by the name of their matrix.
void name_by_matrix(const ModelConfig& config, LayerName& name, LayerTensors& groups) {
  auto matrix = matrix_name(config.quant, name.rest);
  if (matrix) name.rest = groups.renamed.emplace_back(std::move(*matrix));
}

void add_extra(const Architecture& architecture, const ExtraName& extra, int32_t tensor,
               LayerTensors& groups) {
  const LayerName& name = extra.name;
  const auto layer = static_cast<size_t>(extra.layer);
  if (groups.layers.size() <= layer) groups.layers.resize(layer + 1);
  groups.layers[layer].push_back(
      {.tensor = tensor, .rest = name.rest, .canonical = name.canonical});
  if (looks_like_expert(architecture, name.rest) || is_router(architecture, name.rest)) {
    groups.extra.emplace(extra.layer,
                         fmt::format("{}{}.{}.", name.trunk, architecture.layers, name.layer));
  }
}

[[noreturn]] void reject_second_trunk(const TensorTable& table, int32_t tensor,
                                      const std::string& trunk, std::string_view layers,
                                      const LayerName& name) {
  throw Error(ErrorCode::kTensorUnexpected,
              {.what = "expert weights lie outside the model's own layers",
               .file = table.path_of(tensor),
               .tensor = table.info(tensor).name,
               .expected = fmt::format("a name that starts with {}{}.", trunk, layers),
               .found = fmt::format("one that starts with {}{}.", name.trunk, layers)});
}

}  // namespace

std::optional<LayerName> split_model_name(const Architecture& architecture, std::string_view name) {
  if (is_prediction_head(name) || is_other_part(architecture, name)) return std::nullopt;
  return split_layer_name(name, architecture.layers);
}

std::vector<int64_t> LayerTensors::extra_layers() const {
  std::vector<int64_t> numbers;
  for (const auto& [layer, start] : extra) numbers.push_back(layer);
  return numbers;
}

std::string LayerTensors::layer_start(const Architecture& architecture, int64_t layer) const {
  const auto found = extra.find(layer);
  if (found != extra.end()) return found->second;
  return fmt::format("{}{}.{}.", trunk, architecture.layers, layer);
}

LayerTensors group_by_layer(const ModelConfig& config, const TensorTable& table,
                            ExtraLayers extra) {
  const Architecture& architecture = *config.architecture;
  LayerTensors groups;
  std::vector<std::optional<LayerName>> names;
  names.reserve(table.tensors.size());
  TrunkCounts expert_trunks;
  TrunkCounts layer_trunks;
  for (const StoredTensor& tensor : table.tensors) {
    const std::string_view name = tensor.info->name;
    names.push_back(split_model_name(architecture, name));
    if (!names.back()) continue;
    name_by_matrix(config, *names.back(), groups);
    ++layer_trunks[names.back()->trunk];
    if (looks_like_expert(architecture, names.back()->rest)) ++expert_trunks[names.back()->trunk];
  }

  groups.trunk = choose_trunk(expert_trunks, layer_trunks);
  groups.layers.resize(static_cast<size_t>(config.num_hidden_layers));
  Skipped skipped;
  for (size_t i = 0; i < names.size(); ++i) {
    const StoredTensor& tensor = table.tensors[i];
    const std::optional<LayerName>& name = names[i];
    const bool in_trunk = name && name->trunk == groups.trunk;
    auto extra_name = extra == ExtraLayers::kRead
                          ? split_extra_name(config, groups.trunk, tensor.info->name)
                          : std::nullopt;
    if (extra_name) {
      name_by_matrix(config, extra_name->name, groups);
      add_extra(architecture, *extra_name, static_cast<int32_t>(i), groups);
      if (in_moe_block(architecture, extra_name->name.rest)) continue;
    } else if (in_trunk && name->layer < config.num_hidden_layers) {
      groups.layers[static_cast<size_t>(name->layer)].push_back(
          {.tensor = static_cast<int32_t>(i), .rest = name->rest, .canonical = name->canonical});
      if (in_moe_block(architecture, name->rest)) continue;
    } else if (in_trunk) {
      ++skipped.beyond_layers;
      continue;
    } else if (name && looks_like_expert(architecture, name->rest)) {
      reject_second_trunk(table, static_cast<int32_t>(i), groups.trunk, architecture.layers, *name);
    } else if (is_prediction_head(tensor.info->name)) {
      ++skipped.prediction_head;
      continue;
    } else if (is_other_part(architecture, tensor.info->name)) {
      ++skipped.other_part;
      continue;
    }
    if (!is_known_part(tensor.info->name)) skipped.unknown.push_back(tensor.info->name);
  }
  groups.notes = skipped.notes(config.num_hidden_layers);
  if (extra == ExtraLayers::kRead && groups.extra.empty()) {
    groups.notes.push_back(fmt::format("no MoE layers beyond num_hidden_layers = {} are stored",
                                       config.num_hidden_layers));
  }
  return groups;
}

void settle_by_file(const LayerTensors& tensors, const TensorTable& table, ModelConfig& config) {
  if (!config.architecture->router.selection_bias_by_file) return;
  const auto is_bias = [&](const LayerTensor& item) {
    if (is_empty(table.info(item.tensor))) return false;
    const auto match = match_name(*config.architecture, item.rest, [](const NamePattern& pattern) {
      return pattern.part == Part::kSelectionBias;
    });
    return match.has_value();
  };
  for (LayerConfig& layer : config.layers) {
    const auto& items = tensors.layers[static_cast<size_t>(layer.index)];
    layer.spec.router.has_selection_bias = std::any_of(items.begin(), items.end(), is_bias);
  }
}

namespace {

// The type of the first tensor that holds `part`; nothing without one.
std::optional<DType> stored_type(const ModelConfig& config,
                                 const std::optional<QuantizedWeights>& quant,
                                 const TensorTable& table, std::span<const LayerTensor> items,
                                 Part part) {
  const auto wanted = [part](const NamePattern& pattern) { return pattern.part == part; };
  for (const LayerTensor& item : items) {
    const TensorInfo& info = table.info(item.tensor);
    if (is_empty(info) || !match_name(*config.architecture, item.rest, wanted)) continue;
    return type_as_codes(quant, info);
  }
  return std::nullopt;
}

// Settles the type of the residual MLP, which a layer has as values.
void settle_residual(const ModelConfig& config, const std::optional<QuantizedWeights>& quant,
                     const TensorTable& table, std::span<const LayerTensor> items, MoeSpec& spec) {
  if (spec.residual.intermediate_size == 0) return;
  const auto stored = stored_type(config, quant, table, items, Part::kResidualDown);
  spec.residual.weight_dtype = type_of_values(stored.value_or(DType::kBF16));
}

// The names and shapes of such codes belong to another format, such as two fp4 codes per byte.
struct UnreadCodes {
  DType type;
};

void refuse(std::string reason, ModelConfig& config) {
  Quantization found;
  found.method = config.quant_method;
  found.reason = std::move(reason);
  set_quantization(found, config);
}

}  // namespace

void quantise(const QuantizedWeights& quant, MoeSpec& spec) {
  spec.weight_dtype = quant.element;
  spec.quant = quant.spec;
  if (quant.fit != nullptr) quant.fit(quant.stored, spec, spec.quant);
  if (spec.residual.intermediate_size != 0) spec.residual.weight_dtype = DType::kBF16;
}

namespace {

// Decides the types of a layer whose modules have one scheme.
void settle_layer(const ModelConfig& config, const TensorTable& table,
                  std::span<const LayerTensor> items, const QuantizedWeights& quant,
                  LayerConfig& layer) {
  const std::optional<QuantizedWeights> own = quant;
  const auto type = [&](Part part) { return stored_type(config, own, table, items, part); };
  // Any matrix tells the type, should the first be missing.
  std::optional<DType> routed = type(Part::kDown);
  if (!routed) routed = type(Part::kUp);
  if (!routed) routed = type(Part::kGateUp);
  const DType codes = quant.element;
  if (routed && *routed != codes && !is_plain(*routed)) throw UnreadCodes{*routed};
  if (routed != codes) return;
  MoeSpec& spec = layer.spec;
  quantise(quant, spec);
  if (shared_facts(spec).is_there) {
    const auto shared = type(Part::kSharedDown);
    if (shared && shared != codes) spec.shared.weight_dtype = shared;
  }
  settle_residual(config, own, table, items, spec);
}

// The layers of a model whose modules have schemes of their own.
void settle_every_module(const LayerTensors& tensors, const TensorTable& table,
                         ModelConfig& config) {
  std::vector<int64_t> mixed;
  bool keeps_rows = true;
  for (LayerConfig& layer : config.layers) {
    keeps_rows &= settle_modules(config, table, tensors, layer);
    if (layer.is_mixed) mixed.push_back(layer.index);
  }
  if (mixed.empty()) return;
  config.notes.push_back(fmt::format(
      "experts of layers {} are stored in several forms, and read in one that holds all their "
      "values{}",
      render_ranges(mixed), keeps_rows ? "" : "; " + std::string(kPlainRows)));
}

}  // namespace

bool settle_modules(const ModelConfig& config, const TensorTable& table,
                    const LayerTensors& tensors, LayerConfig& layer) {
  const PartsVerdict verdict = settle_parts(config, table, tensors, layer);
  const auto& items = tensors.layers[static_cast<size_t>(layer.index)];
  if (verdict.is_mixed) settle_residual(config, config.quant, table, items, layer.spec);
  if (verdict.is_mixed || layer.quant == nullptr) return verdict.keeps_rows;
  settle_layer(config, table, items, **layer.quant, layer);
  return true;
}

LayerConfig settled_layer(const ModelConfig& config, const TensorTable& table,
                          const LayerTensors& tensors, const LayerConfig& layer) {
  LayerConfig own = layer;
  if (!config.quant || !config.quant->by_module) return own;
  try {
    settle_modules(config, table, tensors, own);
  } catch (const NotRead& refusal) {
    throw Error(ErrorCode::kUnsupportedQuantization,
                {.what = "weights in codes that are not read", .found = refusal.reason});
  }
  return own;
}

namespace {

void settle_stored(const TensorTable& table, QuantizedWeights& quant) {
  if (quant.settle == nullptr) return;
  std::vector<const TensorInfo*> tensors;
  for (const StoredTensor& tensor : table.tensors) tensors.push_back(tensor.info);
  quant.settle(tensors, quant.stored);
}

// Whether some matrices of the layer's routed experts are codes, and others values.
bool is_partly_plain(const ModelConfig& config, const TensorTable& table,
                     std::span<const LayerTensor> items) {
  const auto wanted = [](const NamePattern& pattern) {
    return is_expert_part(pattern.part) && is_quantisable(pattern.part);
  };
  bool has_codes = false;
  bool has_values = false;
  for (const LayerTensor& item : items) {
    const TensorInfo& info = table.info(item.tensor);
    if (is_empty(info) || !match_name(*config.architecture, item.rest, wanted)) continue;
    (is_plain(type_as_codes(config.quant, info)) ? has_values : has_codes) = true;
  }
  return has_codes && has_values;
}

// A quantiser may leave out some modules of a layer: then these have a scheme of their own, none.
void take_modules_apart(const LayerTensors& tensors, const TensorTable& table,
                        ModelConfig& config) {
  const bool any = std::ranges::any_of(config.layers, [&](const LayerConfig& layer) {
    return is_partly_plain(config, table, tensors.layers[static_cast<size_t>(layer.index)]);
  });
  if (!any) return;
  ModuleSchemes schemes;
  schemes.schemes.push_back({.weights = config.quant, .reason = {}});
  schemes.rules.push_back({.scheme = 0});
  config.quant->by_module = std::make_shared<const ModuleSchemes>(std::move(schemes));
}

}  // namespace

void settle_quantization(const LayerTensors& tensors, const TensorTable& table,
                         ModelConfig& config) {
  if (!config.quant) return;
  settle_stored(table, *config.quant);
  if (!config.quant->by_module) take_modules_apart(tensors, table, config);
  try {
    if (config.quant->by_module) return settle_every_module(tensors, table, config);
    for (LayerConfig& layer : config.layers) {
      const auto& items = tensors.layers[static_cast<size_t>(layer.index)];
      settle_layer(config, table, items, *config.quant, layer);
    }
  } catch (const UnreadCodes& codes) {
    refuse(fmt::format("experts stored as {}", to_string(codes.type)), config);
  } catch (const NotRead& refusal) {
    refuse(refusal.reason, config);
  }
}

}  // namespace conclave::inline v0::checkpoint
