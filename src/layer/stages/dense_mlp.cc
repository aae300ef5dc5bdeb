#include "layer/stages/dense_mlp.h"

#include <algorithm>
#include <numeric>

namespace conclave::inline v0 {

void run_on_every_row(const PipelineArgs& args, const DenseMlp& mlp, const RowBundle& rows,
                      float* out) {
  const int64_t count = args.chunk.count;
  const LayerSlices& slices = args.plan.slices;
  auto* source_row = slice_as<int64_t>(args.workspace, slices.all_rows);
  auto* begin = slice_as<int64_t>(args.workspace, slices.all_rows_begin);
  auto* counts = slice_as<int64_t>(args.workspace, slices.all_rows_count);
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
                 {.tag = OutputTag::kPerRow, .rows = out, .row_stride = args.plan.spec.hidden_size},
                 args.workspace.subspan(slices.experts.offset, slices.experts.bytes),
                 args.executor);
}

}  // namespace conclave::inline v0
