#include "checkpoint/layer_parts.h"

#include "checkpoint/common_form.h"
#include "checkpoint/layer_assignment.h"
#include "checkpoint/layer_report.h"
#include "checkpoint/module_names.h"
#include "checkpoint/name_list.h"
#include "checkpoint/scale_names.h"
#include "checkpoint/stored_planes.h"
#include "core/part_spec.h"
#include "core/shared_facts.h"
#include "core/weight_types.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array kMatrices = {WeightMatrix::kGate, WeightMatrix::kUp, WeightMatrix::kDown};
constexpr std::array kGateUp = {WeightMatrix::kGate, WeightMatrix::kUp};
constexpr std::array kDown = {WeightMatrix::kDown};

// A matrix of experts or shared experts by the name of its module.
bool is_matrix(const Architecture& architecture, const std::string& module) {
  const auto wanted = [](const NamePattern& pattern) { return is_quantisable(pattern.part); };
  return match_name(architecture, module + ".weight", wanted) ||
         match_name(architecture, module, wanted);
}

// Whether the module's matrix is stored as values.
bool has_values(const Architecture& architecture, const TensorTable& table,
                std::span<const LayerTensor> items) {
  const auto wanted = [](const NamePattern& pattern) { return is_quantisable(pattern.part); };
  return std::ranges::any_of(items, [&](const LayerTensor& item) {
    return is_plain(table.info(item.tensor).dtype) && match_name(architecture, item.rest, wanted);
  });
}

bool has_codes_at_all(const TensorTable& table, std::span<const LayerTensor> items) {
  return std::ranges::any_of(
      items, [&](const LayerTensor& item) { return !is_plain(table.info(item.tensor).dtype); });
}

// The parts, the first of which has the values.
std::vector<LayerPart> split_by_scheme(const ModelConfig& config, const TensorTable& table,
                                       std::span<const LayerTensor> items) {
  const QuantizedWeights& quant = *config.quant;
  std::map<std::string, std::vector<LayerTensor>> modules;
  for (const LayerTensor& item : items) {
    modules[module_of(quant, table.info(item.tensor).name)].push_back(item);
  }
  std::vector<LayerPart> parts(1);
  const auto part_of = [&](const std::optional<QuantizedWeights>* of) -> LayerPart& {
    for (LayerPart& part : parts) {
      if (part.quant == of) return part;
    }
    return parts.emplace_back(LayerPart{.quant = of});
  };
  const Architecture& architecture = *config.architecture;
  for (const auto& [module, own] : modules) {
    const bool may_be_coded = is_matrix(architecture, module_of(quant, own.front().rest)) &&
                              !has_values(architecture, table, own);
    const ModuleScheme* const scheme = may_be_coded ? scheme_of_module(quant, module) : nullptr;
    if (scheme != nullptr && !scheme->weights && has_codes_at_all(table, own)) {
      throw NotRead{fmt::format("{}: {}", module, scheme->reason)};
    }
    const bool coded = scheme != nullptr && scheme->weights;
    LayerPart& part = part_of(coded ? &scheme->weights : nullptr);
    part.items.insert(part.items.end(), own.begin(), own.end());
  }
  return parts;
}

// A part of a layer as a layer of its own.
class PartLayer {
 public:
  PartLayer(const ModelConfig& config, const TensorTable& table, const LayerTensors& whole,
            const LayerConfig& layer, LayerPart part, const LayerNaming& usual)
      : part_(std::move(part)) {
    layer_.index = layer.index;
    layer_.spec = layer.spec;
    layer_.support = layer.support;
    layer_.is_part = true;
    layer_.spec.weight_dtype = DType::kBF16;
    layer_.spec.quant = {};
    layer_.spec.shared.weight_dtype.reset();
    if (part_.quant != nullptr) {
      layer_.quant = part_.quant;
      quantise(**part_.quant, layer_.spec);
    }
    tensors_.trunk = whole.trunk;
    tensors_.extra = whole.extra;
    tensors_.layers.resize(static_cast<size_t>(layer.index) + 1);
    tensors_.layers.back() = part_.items;
    assignment_.emplace(assign_layer(config, table, tensors_, layer_, usual));
  }

  const LayerAssignment& assignment() const { return *assignment_; }
  const LayerPlanes& planes() const { return assignment_->planes; }
  // The assignment has no planes afterwards.
  LayerMap finish() { return finish_map(std::move(*assignment_)); }
  const MoeSpec& spec() const { return layer_.spec; }
  const std::optional<QuantizedWeights>* quant() const { return part_.quant; }
  MatrixMeaning meaning() const {
    if (part_.quant == nullptr) return {};
    return {.element = (*part_.quant)->element, .quant = layer_.spec.quant};
  }
  bool has(WeightMlp mlp, std::span<const WeightMatrix> matrices = kMatrices) const {
    return std::ranges::any_of(weights::kAll, [&](WeightId id) {
      const bool may_be_coded =
          id.plane() == WeightPlane::kWeights || quant::is_code_plane(id.plane());
      return id.mlp() == mlp && may_be_coded && !planes().slots[id].empty() &&
             std::ranges::find(matrices, *id.matrix()) != matrices.end();
    });
  }

 private:
  LayerPart part_;
  LayerConfig layer_;
  LayerTensors tensors_;
  std::optional<LayerAssignment> assignment_;  // refers to the members above
};

using PartLayers = std::vector<std::unique_ptr<PartLayer>>;

PartLayers parts_of(const ModelConfig& config, const TensorTable& table,
                    const LayerTensors& tensors, const LayerConfig& layer) {
  PartLayers parts;
  const auto& items = tensors.layers[static_cast<size_t>(layer.index)];
  // The part of values comes last: it may have no expert's tensor, and takes names from others.
  LayerNaming usual;
  std::vector<LayerPart> split = split_by_scheme(config, table, items);
  std::rotate(split.begin(), split.begin() + 1, split.end());
  for (LayerPart& part : split) {
    parts.push_back(
        std::make_unique<PartLayer>(config, table, tensors, layer, std::move(part), usual));
    usual = parts.back()->assignment().layout.naming;
  }
  return parts;
}

int64_t count_of(const MoeSpec& spec, WeightMlp mlp) {
  if (mlp == WeightMlp::kRouted) return spec.num_experts;
  return !shared_facts(spec).is_there ? 0 : spec.shared.count;
}

std::vector<const PartLayer*> parts_with(const PartLayers& parts, WeightMlp mlp) {
  std::vector<const PartLayer*> found;
  for (const auto& part : parts) {
    if (part->has(mlp)) found.push_back(part.get());
  }
  return found;
}

// The type of the first matrix of values that the part has of an MLP.
DType plain_type(const PartLayer& part, WeightMlp mlp) {
  for (const WeightMatrix matrix : kMatrices) {
    const MatrixLocation* const first = part.planes().first({mlp, matrix});
    if (first != nullptr) return part.planes().type_of(part.assignment().view.table, *first);
  }
  return DType::kF32;
}

// Without a scheme only values have a meaning.
MatrixMeaning meaning_of(const PartLayer& part, WeightMlp mlp) {
  if (part.quant() != nullptr) return part.meaning();
  const DType type = plain_type(part, mlp);
  if (!is_plain(type)) throw NotRead{fmt::format("experts stored as {}", to_string(type))};
  return {.element = type};
}

CommonForm form_of(const std::vector<const PartLayer*>& parts, WeightMlp mlp) {
  if (parts.empty()) return {};
  std::vector<MatrixMeaning> meanings;
  for (const PartLayer* part : parts) meanings.push_back(meaning_of(*part, mlp));
  return common_form(meanings);
}

// Gate and up, or down, of routed experts and of shared ones with codes may be known to have less
// than the layer's form.
MatrixCodes known_of(const PartLayers& parts, std::span<const WeightMatrix> matrices,
                     const MoeSpec& spec) {
  std::vector<MatrixMeaning> meanings;
  for (const WeightMlp mlp : {WeightMlp::kRouted, WeightMlp::kShared}) {
    if (mlp == WeightMlp::kShared && is_plain(shared_weight_dtype(spec))) continue;
    for (const auto& part : parts) {
      if (part->has(mlp, matrices)) meanings.push_back(meaning_of(*part, mlp));
    }
  }
  return known_codes(meanings, {.element = spec.weight_dtype, .quant = spec.quant});
}

// One part has all experts, and shared ones lie there too or have values.
bool is_uniform(const std::vector<const PartLayer*>& routed,
                const std::vector<const PartLayer*>& shared) {
  if (routed.size() > 1 || shared.size() > 1) return false;
  if (shared.empty() || shared.front()->quant() == nullptr) return true;
  return !routed.empty() && routed.front() == shared.front();
}

void set_mixed(const CommonForm& routed, const CommonForm& shared, MoeSpec& spec) {
  spec.weight_dtype = routed.meaning.element;
  spec.quant = routed.meaning.quant;
  if (!shared_facts(spec).is_there || shared.meaning == routed.meaning) return;
  const DType type = shared.meaning.element;
  spec.shared.weight_dtype = is_plain(type) ? type : DType::kF32;
}

}  // namespace

PartsVerdict settle_parts(const ModelConfig& config, const TensorTable& table,
                          const LayerTensors& tensors, LayerConfig& layer) {
  const PartLayers parts = parts_of(config, table, tensors, layer);
  const auto routed = parts_with(parts, WeightMlp::kRouted);
  const auto shared = parts_with(parts, WeightMlp::kShared);
  if (is_uniform(routed, shared)) {
    if (!routed.empty()) layer.quant = routed.front()->quant();
    return {};
  }
  const CommonForm of_routed = form_of(routed, WeightMlp::kRouted);
  const CommonForm of_shared = form_of(shared, WeightMlp::kShared);
  const bool shared_are_values = is_plain(of_shared.meaning.element);
  const bool shared_rows = of_shared.meaning.quant.activations != ActivationScale::kNone;
  set_mixed(of_routed, of_shared, layer.spec);
  const MatrixCodes gate_up = known_of(parts, kGateUp, layer.spec);
  const MatrixCodes down = known_of(parts, kDown, layer.spec);
  layer.spec.quant.gate_up_codes = gate_up;
  layer.spec.quant.down_codes = down;
  layer.is_mixed = true;
  const bool widens_shared = !shared_are_values && layer.spec.shared.weight_dtype;
  return {.is_mixed = true,
          .keeps_rows =
              of_routed.keeps_rows && of_shared.keeps_rows && !(widens_shared && shared_rows)};
}

namespace {

// Names of what is missing: of parts, and of matrices that no part has anything of.
std::vector<std::string> missing_names(const PartLayers& parts, const MoeSpec& spec, size_t limit) {
  std::vector<std::string> names;
  for (const auto& part : parts) {
    if (names.size() >= limit) return names;
    for (std::string& name : list_missing(part->assignment(), limit - names.size())) {
      names.push_back(std::move(name));
    }
  }
  for (const WeightMlp mlp : {WeightMlp::kRouted, WeightMlp::kShared}) {
    const bool gated = mlp == WeightMlp::kRouted
                           ? is_gated(spec.activation)
                           : is_gated(activation_or_routed(spec.shared.activation, spec));
    for (const WeightMatrix matrix : kMatrices) {
      if (matrix == WeightMatrix::kGate && !gated) continue;
      const int64_t count = count_of(spec, mlp);
      for (int64_t expert = 0; expert < count && names.size() < limit; ++expert) {
        const WeightId id{mlp, matrix};
        const bool is_there = std::ranges::any_of(
            parts, [&](const auto& part) { return part->planes().has_any_of(id, expert); });
        if (!is_there) names.push_back(expected_name(parts.front()->assignment(), id, expert));
      }
    }
  }
  return names;
}

[[noreturn]] void reject_missing(const TensorTable& table, const std::vector<std::string>& names) {
  const std::string& first = names.front();
  const size_t space = std::min(first.size(), first.find(' '));
  throw Error(ErrorCode::kTensorMissing,
              {.what = names.size() == 1 ? "a tensor of the model is missing"
                                         : "this and more tensors of the model are missing",
               .file = table.listing,
               .tensor = first.substr(0, space),
               .expected = names.size() == 1 ? first.substr(std::min(first.size(), space + 1))
                                             : first_few(names)});
}

// Lists what layers read of an MLP's matrices; the part that has them says where they lie.
void merge_mlp(const MoeSpec& spec, WeightMlp mlp, LayerMap& map) {
  const DType type = mlp == WeightMlp::kRouted ? spec.weight_dtype : shared_weight_dtype(spec);
  for (const WeightMatrix matrix : kMatrices) {
    const WeightId id{mlp, matrix};
    StoredMatrices& merged = map.stored[id];
    for (const LayerMap& part : map.parts) {
      const StoredMatrices& own = part.stored[id];
      if (own.info.count == 0) continue;
      merged.info = {own.info.count, own.info.rows, own.info.cols, type};
      merged.matrices.resize(own.matrices.size());
      for (size_t expert = 0; expert < own.matrices.size(); ++expert) {
        if (own.matrices[expert].tensor >= 0) merged.matrices[expert] = own.matrices[expert];
      }
    }
  }
}

void take_rest(const LayerMap& part, LayerMap& map) {
  for (const WeightId id : weights::kAll) {
    const bool is_of_experts = id.mlp() && id.mlp() != WeightMlp::kResidual;
    if (!is_of_experts) map.stored[id] = part.stored[id];
  }
  map.readings = part.readings;
}

}  // namespace

LayerMap map_parts(const ModelConfig& config, const TensorTable& table, const LayerTensors& tensors,
                   const LayerConfig& layer) {
  const PartLayers parts = parts_of(config, table, tensors, layer);
  const auto missing = missing_names(parts, layer.spec, kMaxListedNames);
  if (!missing.empty()) reject_missing(table, missing);
  LayerMap map;
  int64_t most = -1;
  for (const auto& part : parts) {
    check_strays(part->assignment());
    const int64_t expert_tensors = part->assignment().layout.expert_tensors;
    LayerMap own = part->finish();
    own.quant = part->spec().quant;
    if (part->quant() != nullptr) own.scheme = *part->quant();
    map.bytes += own.bytes;
    if (!own.support) map.support = own.support;
    if (expert_tensors > most) {
      most = expert_tensors;
      map.index = own.index;
      map.prefix = own.prefix;
      map.layout = own.layout;
    }
    // Weights that belong to no expert lie in the part of values, the last one.
    if (part == parts.back()) take_rest(own, map);
    map.parts.push_back(std::move(own));
  }
  map.quant = layer.spec.quant;
  merge_mlp(layer.spec, WeightMlp::kRouted, map);
  merge_mlp(layer.spec, WeightMlp::kShared, map);
  return map;
}

std::vector<std::string> missing_of_parts(const ModelConfig& config, const TensorTable& table,
                                          const LayerTensors& tensors, const LayerConfig& layer,
                                          size_t limit) {
  return missing_names(parts_of(config, table, tensors, layer), layer.spec, limit);
}

}  // namespace conclave::inline v0::checkpoint
