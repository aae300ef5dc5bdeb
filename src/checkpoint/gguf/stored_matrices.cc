#include "checkpoint/gguf/stored_matrices.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <tuple>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kWeight = ".weight";
// llama.cpp reads these beside quantised weights and never uses them.
constexpr std::string_view kInputScale = ".input_scale";
constexpr std::array kMatrixIds = {weights::kGate,       weights::kUp,       weights::kDown,
                                   weights::kSharedGate, weights::kSharedUp, weights::kSharedDown};

const GgufMatrix& factor_of(const GgufLayer& layer, WeightId id) {
  static const GgufMatrix kNone;
  if (id.mlp() != WeightMlp::kRouted) return kNone;
  if (id == weights::kGate) return layer.gate_factor;
  return id == weights::kUp ? layer.up_factor : layer.down_factor;
}

struct Placed {
  StoredMatrix matrix;
  int64_t first_row = 0;
};

StoredMatrix name_matrix(const io::GgufFile& file, const GgufLayer& layer, WeightId id,
                         int64_t expert, const std::string& tensor) {
  StoredMatrix named{.id = id, .expert = expert, .tensors = {tensor}, .module = tensor};
  if (tensor.ends_with(kWeight)) named.module.resize(tensor.size() - kWeight.size());
  const GgufMatrix& factor = factor_of(layer, id);
  if (factor.place) named.tensors.push_back(factor.place.tensor->name);
  const std::string step = named.module + std::string(kInputScale);
  if (file.find_tensor(step)) named.tensors.push_back(step);
  return named;
}

}  // namespace

std::vector<StoredMatrix> name_gguf_matrices(const io::GgufFile& file, const GgufLayer& layer) {
  std::vector<Placed> placed;
  for (const WeightId id : kMatrixIds) {
    const std::vector<GgufMatrix>& matrices = layer.stored[id].matrices;
    for (size_t expert = 0; expert < matrices.size(); ++expert) {
      const GgufMatrix& matrix = matrices[expert];
      placed.push_back({.matrix = name_matrix(file, layer, id, static_cast<int64_t>(expert),
                                              matrix.place.tensor->name),
                        .first_row = matrix.first_row});
    }
  }
  // Gate and up of an expert may lie in one tensor, in turn with those of the others.
  std::ranges::stable_sort(placed, {}, [](const Placed& matrix) {
    return std::tuple(matrix.matrix.module, matrix.first_row);
  });
  std::vector<StoredMatrix> named;
  for (Placed& matrix : placed) named.push_back(std::move(matrix.matrix));
  return named;
}

}  // namespace conclave::inline v0::checkpoint
