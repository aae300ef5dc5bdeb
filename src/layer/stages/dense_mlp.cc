#include "layer/stages/dense_mlp.h"

#include <numeric>

namespace conclave::inline v0 {

float* run_on_every_row(const DenseMlp& mlp, const RowBundle& rows, const DenseBuffers& buffers,
                        Executor& executor) {
  const int64_t count = rows.num_rows;
  int64_t* const begin = buffers.index;
  int64_t* const counts = begin + mlp.num_experts;
  int64_t* const source_row = counts + mlp.num_experts;
  for (int64_t expert = 0; expert < mlp.num_experts; ++expert) {
    begin[expert] = expert * count;
    counts[expert] = count;
    std::iota(source_row + expert * count, source_row + (expert + 1) * count, int64_t{0});
  }
  mlp.kernel.run({.bundle = rows,
                  .layout = BatchLayout::kContiguous,
                  .num_local_experts = mlp.num_experts,
                  .num_slots = mlp.num_experts * count,
                  .expert_begin = begin,
                  .expert_count = counts,
                  .source_row = source_row},
                 mlp.weights,
                 {.tag = OutputTag::kPerRow, .rows = buffers.out, .row_stride = mlp.hidden_size},
                 buffers.scratch, executor);
  return buffers.out;
}

}  // namespace conclave::inline v0
