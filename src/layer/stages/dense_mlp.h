// Runs the few experts that every row uses: shared experts and the residual MLP.
#pragma once

#include "core/flow.h"
#include "experts/kernel.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace conclave::inline v0 {

struct DenseMlp {
  const experts::ExpertsKernel& kernel;
  experts::PackedExperts weights;
  int64_t num_experts = 1;
  int64_t hidden_size = 0;
};

// Elements of the index that run_on_every_row writes: where the rows of each expert begin, how many
// there are, and which row each slot reads.
constexpr int64_t every_row_index_size(int64_t num_experts, int64_t tokens) {
  return num_experts * (tokens + 2);
}

struct DenseBuffers {
  int64_t* index = nullptr;  // every_row_index_size
  std::span<std::byte> scratch;
  float* out = nullptr;  // [num_experts, T, H]
};

// Each expert applied to each row; returns buffers.out, dense.
float* run_on_every_row(const DenseMlp& mlp, const RowBundle& rows, const DenseBuffers& buffers,
                        Executor& executor);

}  // namespace conclave::inline v0
