#include "checkpoint/stored_matrices.h"

#include "checkpoint/generic_names.h"
#include "checkpoint/layer_names.h"
#include "checkpoint/stored_planes.h"
#include "checkpoint/tensor_name.h"
#include "quant/planes.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kWeight = ".weight";
constexpr std::array kMatrices = {weights::kGate,       weights::kUp,       weights::kDown,
                                  weights::kSharedGate, weights::kSharedUp, weights::kSharedDown};

// The family's pattern for a tensor of this matrix alone; for routed experts one for each expert.
const NamePattern* pattern_of(const Architecture& architecture, WeightId id) {
  const NamePattern* found = nullptr;
  const auto attempt = [&](const NamePattern& pattern) {
    const auto ids = ids_of(pattern.part);
    const bool alone = ids.size() == 1 && ids.front() == id && pattern.text.ends_with(kWeight);
    const bool own = !is_expert_part(pattern.part) || has_expert_placeholder(pattern.text);
    if (found == nullptr && alone && own) found = &pattern;
  };
  for_each_form(architecture, [&](const ExpertForm& form) {
    for (const NamePattern& pattern : form.patterns) attempt(pattern);
  });
  for_each_once(architecture, attempt);
  return found;
}

std::string without_weight(std::string_view name) {
  if (name.ends_with(kWeight)) name.remove_suffix(kWeight.size());
  return std::string(name);
}

class Naming {
 public:
  Naming(const ModelConfig& config, const std::optional<QuantizedWeights>& quant,
         const TensorTable& table, const LayerMap& layer)
      : config_(config), quant_(quant), table_(table), layer_(layer) {
    if (!quant || quant->planes.empty()) return;
    for (const StoredTensor& tensor : table.tensors) {
      if (tensor.info->name.starts_with(layer.prefix)) present_.insert(tensor.info->name);
    }
  }

  std::vector<StoredMatrix> list() const {
    std::vector<StoredMatrix> named;
    for (const WeightId id : kMatrices) {
      const StoredMatrices& stored = layer_.stored[id];
      for (int64_t expert = 0; expert < stored.info.count; ++expert) {
        if (location(id, expert).tensor < 0) continue;  // another part has it
        named.push_back({.id = id,
                         .expert = expert,
                         .tensors = tensors_of(id, expert),
                         .module = module_of(id, expert)});
      }
    }
    return named;
  }

 private:
  const MatrixLocation& location(WeightId id, int64_t expert) const {
    return layer_.stored[id].matrices[static_cast<size_t>(expert)];
  }

  std::vector<std::string> tensors_of(WeightId id, int64_t expert) const {
    std::vector<std::string> names = {table_.info(location(id, expert).tensor).name};
    for (const WeightPlane plane : quant::kCodePlanes) {
      const StoredMatrices& stored = layer_.stored[id.with(plane)];
      if (stored.info.count <= expert) continue;
      names.push_back(table_.info(location(id.with(plane), expert).tensor).name);
    }
    add_aids(names);
    return names;
  }

  // Adds what a method stores for a matrix beside its planes.
  void add_aids(std::vector<std::string>& names) const {
    if (present_.empty()) return;
    const std::string matrix = canonical_name(names.front());
    for (const StoredPlane& row : quant_->planes) {
      if (!matrix.ends_with(row.ending)) continue;
      std::string name = stored_name(row, matrix);
      const bool is_new = std::ranges::find(names, name) == names.end();
      if (is_new && present_.contains(name)) names.push_back(std::move(name));
    }
  }

  std::string canonical_name(const std::string& stored) const {
    return matrix_name(quant_, stored).value_or(stored);
  }

  std::string module_of(WeightId id, int64_t expert) const {
    const MatrixLocation& matrix = location(id, expert);
    const std::string name = canonical_name(table_.info(matrix.tensor).name);
    if (name.ends_with(kWeight) && lies_alone(id, matrix)) return without_weight(name);
    const NamePattern* const pattern = pattern_of(*config_.architecture, id);
    if (pattern == nullptr) return {};
    const bool one_each = has_expert_placeholder(pattern->text);
    if (!one_each && layer_.stored[id].info.count > 1) return {};
    return without_weight(layer_start(*pattern) + render_name(*pattern, {}, expert));
  }

  // The start precedes the pattern's text; the base that stands in the text is no part of it.
  std::string layer_start(const NamePattern& pattern) const {
    std::string_view start = layer_.prefix;
    if (pattern.text.starts_with("{base}")) return std::string(start);
    size_t longest = 0;
    for (const std::string_view base : config_.architecture->bases) {
      if (start.ends_with(base)) longest = std::max(longest, base.size());
    }
    start.remove_suffix(longest);
    return std::string(start);
  }

  // Whether nothing but whole rows of this expert's matrices lies in the tensor.
  bool lies_alone(WeightId id, const MatrixLocation& matrix) const {
    const WeightInfo& info = layer_.stored[id].info;
    const bool rows_in_turn = matrix.col_stride == 1 && matrix.row_stride == info.cols;
    return rows_in_turn && rows_of_tensor(*id.mlp(), matrix.tensor) == stored_rows(matrix);
  }

  // The rows of the matrix that the tensor is or stands for; 0 for a stack.
  int64_t stored_rows(const MatrixLocation& matrix) const {
    if (matrix.reading >= 0) {
      const PlaneReading& reading = layer_.readings[static_cast<size_t>(matrix.reading)];
      return reading.slices == 1 ? reading.form.rows : 0;
    }
    const auto& shape = table_.info(matrix.tensor).shape;
    return shape.size() == 2 ? shape[0] : 0;
  }

  // The rows of the tensor that belong to matrices of one expert; more experts make them too many.
  int64_t rows_of_tensor(WeightMlp mlp, int32_t tensor) const {
    int64_t rows = 0;
    for (const WeightId id : kMatrices) {
      if (id.mlp() != mlp) continue;
      const auto& matrices = layer_.stored[id].matrices;
      const auto held = std::ranges::count(matrices, tensor, &MatrixLocation::tensor);
      if (held > 1) return -1;
      rows += held * layer_.stored[id].info.rows;
    }
    return rows;
  }

  const ModelConfig& config_;
  const std::optional<QuantizedWeights>& quant_;
  const TensorTable& table_;
  const LayerMap& layer_;
  std::unordered_set<std::string_view> present_;
};

}  // namespace

std::vector<StoredMatrix> name_matrices(const ModelConfig& config, const TensorTable& table,
                                        const LayerMap& layer) {
  const auto own = std::ranges::find(config.layers, layer.index, &LayerConfig::index);
  if (layer.parts.empty()) {
    const bool has_own = own != config.layers.end() && own->quant != nullptr;
    return Naming(config, has_own ? *own->quant : config.quant, table, layer).list();
  }
  std::vector<StoredMatrix> named;
  for (const LayerMap& part : layer.parts) {
    for (StoredMatrix& matrix : Naming(config, part.scheme, table, part).list()) {
      named.push_back(std::move(matrix));
    }
  }
  const auto place = [](const StoredMatrix& matrix) {
    return std::pair(std::ranges::find(kMatrices, matrix.id) - kMatrices.begin(), matrix.expert);
  };
  std::ranges::sort(named, {}, place);
  return named;
}

}  // namespace conclave::inline v0::checkpoint
