#include "checkpoint/stored_matrices.h"

#include "checkpoint/code_words.h"
#include "checkpoint/generic_names.h"
#include "checkpoint/layer_names.h"
#include "checkpoint/tensor_name.h"
#include "quant/planes.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

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
  Naming(const ModelConfig& config, const TensorTable& table, const LayerMap& layer)
      : config_(config), table_(table), layer_(layer) {}

  std::vector<StoredMatrix> list() const {
    std::vector<StoredMatrix> named;
    for (const WeightId id : kMatrices) {
      const StoredMatrices& stored = layer_.stored[id];
      for (int64_t expert = 0; expert < stored.info.count; ++expert) {
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
    return names;
  }

  std::string module_of(WeightId id, int64_t expert) const {
    const MatrixLocation& matrix = location(id, expert);
    const std::string_view name = matrix_name(config_.quant, table_.info(matrix.tensor).name);
    if (name.ends_with(kWeight) && lies_alone(id, matrix)) return without_weight(name);
    const NamePattern* const pattern = pattern_of(*config_.architecture, id);
    if (pattern == nullptr) return {};
    const bool one_each = has_expert_placeholder(pattern->text);
    if (!one_each && layer_.stored[id].info.count > 1) return {};
    return without_weight(layer_start(*pattern) + render_name(*pattern, {}, expert));
  }

  // What precedes the pattern's text, less the base that stands in it.
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
    const auto& shape = table_.info(matrix.tensor).shape;
    const bool rows_in_turn = matrix.col_stride == 1 && matrix.row_stride == info.cols;
    return rows_in_turn && shape.size() == 2 &&
           rows_of_tensor(*id.mlp(), matrix.tensor) == shape[0];
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
  const TensorTable& table_;
  const LayerMap& layer_;
};

}  // namespace

std::vector<StoredMatrix> name_matrices(const ModelConfig& config, const TensorTable& table,
                                        const LayerMap& layer) {
  return Naming(config, table, layer).list();
}

}  // namespace conclave::inline v0::checkpoint
