#include "bench/bench_adapters.h"

#include "conclave/synthetic.h"
#include "conclave/tensor.h"

#include <fmt/format.h>

#include <memory>
#include <utility>

namespace conclave::tool {
namespace {

struct Matrix {
  WeightMatrix matrix;
  int64_t rows;
  int64_t cols;
};

std::vector<Matrix> matrices_of(const MoeSpec& spec) {
  const int64_t width = expert_width(spec);
  std::vector<Matrix> found = {{WeightMatrix::kUp, spec.intermediate_size, width},
                               {WeightMatrix::kDown, width, spec.intermediate_size}};
  if (is_gated(spec.activation)) {
    found.push_back({WeightMatrix::kGate, spec.intermediate_size, width});
  }
  return found;
}

}  // namespace

std::string adapted_tokens(const AdapterLoad& load) {
  return load.count == 1 ? "all" : "all, in turn";
}

std::string describe(const AdapterLoad& load) {
  const std::string whose = load.count == 1
                                ? "one that all tokens have"
                                : fmt::format("{}, which tokens take in turn", load.count);
  return fmt::format(
      "adapters: {}, of rank {} in bf16 on every routed expert; repetitions with and without "
      "alternate, and only columns that say so are of those with",
      whose, load.rank);
}

double adapter_bytes(const MoeSpec& spec, int32_t rank) {
  int64_t numbers = 0;
  for (const Matrix& matrix : matrices_of(spec)) numbers += matrix.rows + matrix.cols;
  return static_cast<double>(spec.num_experts) * static_cast<double>(numbers) * rank *
         static_cast<double>(byte_size(DType::kBF16));
}

LoraAdapter random_adapter(const MoeSpec& spec, int32_t rank, uint64_t seed) {
  auto memory = std::make_shared<std::vector<Tensor>>();
  LoraAdapter adapter{.name = fmt::format("random, rank {}", rank)};
  for (const Matrix& matrix : matrices_of(spec)) {
    Tensor a(DType::kBF16, {rank, matrix.cols});
    Tensor b(DType::kBF16, {matrix.rows, rank});
    fill_random(a.view(), seed++);
    fill_random(b.view(), seed++);
    for (int64_t expert = 0; expert < spec.num_experts; ++expert) {
      adapter.factors.push_back(
          {.matrix = matrix.matrix, .expert = expert, .a = a.const_view(), .b = b.const_view()});
    }
    memory->push_back(std::move(a));
    memory->push_back(std::move(b));
  }
  adapter.memory = std::move(memory);
  return adapter;
}

void add_random_adapters(MoeLayer& layer, const AdapterLoad& load, uint64_t seed) {
  if (load.rank == 0) return;
  for (int32_t i = 0; i < load.count; ++i) {
    layer.add_adapter(
        random_adapter(layer.spec(), load.rank, seed + static_cast<uint64_t>(i) * 64));
  }
}

std::vector<int32_t> adapters_in_turn(const AdapterLoad& load, int64_t num_tokens) {
  std::vector<int32_t> ids;
  for (int64_t token = 0; token < num_tokens; ++token) {
    ids.push_back(static_cast<int32_t>(token % load.count));
  }
  return ids;
}

}  // namespace conclave::tool
