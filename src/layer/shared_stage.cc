#include "layer/shared_stage.h"

#include "cpu/parallel.h"
#include "layer/route_stage.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace conclave::inline v0 {
namespace {

// Rows of one task: large enough to outweigh taking it.
constexpr int64_t kRowsPerTask = 16;

float sigmoid(float value) { return 1.0F / (1.0F + std::exp(-value)); }

}  // namespace

const float* run_shared_expert(const PipelineArgs& args, const RowBundle& rows) {
  const LayerPlan& plan = args.plan;
  if (plan.shared == nullptr) return nullptr;
  const int64_t count = args.chunk.count;
  auto* output = slice_as<float>(args.workspace, plan.slices.shared_rows);
  auto* source_row = slice_as<int64_t>(args.workspace, plan.slices.shared_source);
  std::iota(source_row, source_row + count, int64_t{0});
  const int64_t expert_begin = 0;
  plan.shared->run(
      {.bundle = rows,
       .layout = BatchLayout::kContiguous,
       .num_local_experts = 1,
       .num_slots = count,
       .expert_begin = &expert_begin,
       .expert_count = &count,
       .source_row = source_row},
      {.gate_up = args.weights.shared_gate_up.data(), .down = args.weights.shared_down.data()},
      {.tag = OutputTag::kPerRow, .rows = output, .row_stride = plan.shared_row_stride},
      args.workspace.subspan(plan.slices.experts.offset, plan.slices.experts.bytes), args.executor);

  const bool gated = plan.spec.shared.mode == SharedMode::kSigmoidGate;
  if (!gated && args.args.padding_mask.empty()) return output;
  auto* gate = slice_as<float>(args.workspace, plan.slices.shared_gate);
  if (gated)
    args.weights.shared_gate->run(float_rows(args, rows), gate, DType::kF32, args.executor);
  cpu::parallel_for(args.executor, count, kRowsPerTask,
                    [&](int64_t begin, int64_t end, int32_t) noexcept {
                      for (int64_t token = begin; token < end; ++token) {
                        float* row = output + token * plan.shared_row_stride;
                        if (!is_token(args, token)) {
                          std::fill_n(row, plan.spec.hidden_size, 0.0F);
                          continue;
                        }
                        if (!gated) continue;
                        const float scale = sigmoid(gate[token]);
                        for (int64_t col = 0; col < plan.spec.hidden_size; ++col) row[col] *= scale;
                      }
                    });
  return output;
}

}  // namespace conclave::inline v0
