#include "experts/cuda/decode_plan.h"

#include "experts/cuda/decode_call.h"
#include "experts/cuda/decode_tables.h"

#include <algorithm>
#include <limits>
#include <string>

namespace conclave::inline v0::experts {
namespace {

constexpr int64_t kMaxStages = 8;
constexpr int64_t kMinStages = 2;
constexpr int64_t kMaxWidth = int64_t{1} << 24;

int64_t divide_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }
int64_t round_up(int64_t value, int64_t unit) { return divide_up(value, unit) * unit; }
int32_t narrow(int64_t value) { return static_cast<int32_t>(value); }

// The number of slices at which one token's work divides best among the warps.
int64_t choose_k_slices(int64_t units, int64_t boxes) {
  int64_t best = 1;
  double best_waste = std::numeric_limits<double>::max();
  for (int64_t slices = 1; slices <= std::min<int64_t>(8, boxes); ++slices) {
    const int64_t work = units * slices;
    const double waste =
        static_cast<double>(round_up(work, kDecodeWarps)) / static_cast<double>(work);
    if (waste < best_waste - 0.02) {
      best = slices;
      best_waste = waste;
    }
  }
  return best;
}

bool is_quantised(const DeviceExpertsProblem& problem) {
  return problem.weight_dtype == DType::kF8E4M3;
}

Support supports_quant(const QuantSpec& quant) {
  switch (quant.weights) {
    case WeightScale::kBlock:
      if (quant.block_rows != 128 || quant.block_cols != 128)
        return Support::no("blocks of scales are not 128x128");
      if (quant.activations != ActivationScale::kGroup)
        return Support::no("block scales need activations quantised in groups");
      return Support::yes();
    case WeightScale::kTensor:
    case WeightScale::kChannel:
      if (quant.activations != ActivationScale::kToken &&
          quant.activations != ActivationScale::kTensorStatic)
        return Support::no("row scales need activations quantised by row or by a constant");
      return Support::yes();
    case WeightScale::kNone:
      break;
  }
  return Support::no("e4m3 weights without scales");
}

}  // namespace

DecodePlan decode_plan(const DeviceExpertsProblem& problem) {
  DecodePlan plan;
  plan.blocks = problem.device.multiprocessors;
  plan.hidden_size = narrow(problem.hidden_size);
  plan.intermediate_size = narrow(problem.intermediate_size);
  plan.top_k = narrow(problem.top_k);
  plan.num_local_experts = narrow(problem.num_local_experts);
  plan.element_bytes = is_quantised(problem) ? 1 : 2;
  const int64_t box = kDecodeBoxBytes / plan.element_bytes;
  plan.up_boxes = narrow(divide_up(problem.hidden_size, box));
  plan.down_boxes = narrow(divide_up(problem.intermediate_size, box));
  plan.tile_features = problem.activation.gated ? 8 : 16;
  plan.feature_tiles = narrow(divide_up(problem.intermediate_size, plan.tile_features));
  const int64_t rows = divide_up(problem.hidden_size, plan.blocks);
  plan.passes = narrow(divide_up(rows, kDecodeMaxPassRows));
  plan.pass_rows = narrow(divide_up(rows, plan.passes));
  plan.k_slices = narrow(choose_k_slices(problem.top_k * plan.passes, plan.down_boxes));
  plan.down_box_bytes = narrow(round_up(plan.pass_rows, 16) * kDecodeBoxBytes);
  plan.down_stage_boxes = kDecodeStageBytes / plan.down_box_bytes;
  plan.intermediate_bytes = is_quantised(problem) ? 4 : 2;
  plan.intermediate_stride = plan.down_boxes * box;
  for (int32_t tokens = 1; tokens <= kDecodeMaxTokens && tokens * problem.top_k <= kDecodeMaxPairs;
       ++tokens) {
    if (decode_shared(plan, tokens, problem.device.shared_bytes_per_block).stages == 0) break;
    plan.max_tokens = tokens;
  }
  return plan;
}

DecodeShared decode_shared(const DecodePlan& plan, int64_t tokens, int64_t shared_bytes_per_block) {
  // 64 more than whole lines: rows of neighbouring tokens then lie in different banks.
  const int64_t row_pitch = int64_t{plan.up_boxes} * kDecodeBoxBytes + 64;
  const int64_t row_scales =
      plan.element_bytes == 1 ? int64_t{plan.up_boxes} * kDecodeMaxTokens * 4 : 0;
  // The sums of the down product take the place of the rows.
  const int64_t sums = tokens * plan.top_k * plan.k_slices * plan.block_rows() * 4;
  const int64_t rows = round_up(std::max(tokens * row_pitch, sums), 128);
  const int64_t tables = round_up(sizeof(DecodeTables), 128);
  const int64_t fixed = tables + round_up(row_scales, 128) + rows + 1024;

  constexpr int64_t kStageScaleBytes = kDecodeStageBytes / 2048 * 2 * 4;
  const int64_t a_stage = kDecodeWarps * (kDecodeStageBytes + 8 + kStageScaleBytes);
  const int64_t stages = std::min(kMaxStages, (shared_bytes_per_block - fixed) / a_stage);
  if (stages < kMinStages) return {};
  DecodeShared shared;
  shared.stages = narrow(stages);
  const int64_t slots = kDecodeWarps * stages;
  int64_t end = slots * kDecodeStageBytes;
  const auto take = [&end](int64_t bytes) {
    const int64_t begin = end;
    end += round_up(bytes, 128);
    return static_cast<uint32_t>(begin);
  };
  shared.barriers = take(slots * 8);
  shared.stage_scales = take(slots * kStageScaleBytes);
  shared.tables = take(tables);
  shared.row_scales = take(row_scales);
  shared.row_pitch = static_cast<uint32_t>(row_pitch);
  shared.rows = take(rows);
  shared.total = static_cast<uint32_t>(end);
  return shared;
}

Support decode_supports(const DeviceExpertsProblem& problem) {
  if (!problem.device.is_hopper())
    return Support::no("the device is not of compute capability 9.0");
  if (problem.weight_dtype != DType::kBF16 && problem.weight_dtype != DType::kF16 &&
      !is_quantised(problem))
    return Support::no("weights are not bf16, f16 or e4m3");
  if (is_quantised(problem)) {
    if (Support support = supports_quant(problem.quant); !support) return support;
  }
  if (problem.num_local_experts < 1) return Support::no("no local experts");
  if (problem.hidden_size > kMaxWidth || problem.intermediate_size > kMaxWidth)
    return Support::no("rows wider than 2^24");
  if (problem.top_k > kDecodeMaxPairs) return Support::no("more than 256 experts a token");
  if (decode_plan(problem).max_tokens == 0)
    return Support::no("a row of the hidden size leaves no shared memory for weights");
  return Support::yes();
}

}  // namespace conclave::inline v0::experts
