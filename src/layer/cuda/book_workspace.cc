#include "layer/cuda/book_workspace.h"

#include "core/checked.h"
#include "dispatch/cuda/group.h"
#include "gemm/cuda/gate_product.h"
#include "layer/cuda/row_format.h"

#include "conclave/error.h"

#include <algorithm>

namespace conclave::inline v0 {
namespace {

// Of slices of device memory: whole lines of every kind of copy.
constexpr int64_t kSliceBytes = 256;

// Slices at whole multiples of 256 bytes, behind the counters.
class Booking {
 public:
  Booking() { static_cast<void>(layout_.book_bytes(kWorkspaceCounterBytes, 1)); }

  WorkspaceSlice book(int64_t count, int64_t element_bytes) {
    const auto bytes = checked_mul(count, element_bytes);
    if (!bytes) throw Error(ErrorCode::kSizeOverflow, "the workspace exceeds 63 bits");
    return layout_.book_bytes(round_up(*bytes, kSliceBytes), 1);
  }
  size_t total_bytes() const { return layout_.total_bytes(); }

 private:
  WorkspaceLayout layout_;
};

bool is_quantised(const MoeSpec& spec) {
  return spec.weight_dtype == DType::kF8E4M3 && spec.quant.activations != ActivationScale::kNone;
}

// Of one hidden row as experts read it: codes, and in its place a plain row for shared experts that
// are not quantised.
int64_t hidden_row_bytes(const CudaPlan& plan) {
  const int64_t plain = plan.row_stride * byte_size(plan.row_dtype);
  if (!is_quantised(plan.spec)) return plain;
  const bool has_plain_reader = plan.shared && plan.shared->weight_dtype != DType::kF8E4M3;
  return has_plain_reader ? plain : padded_row(plan.spec.hidden_size, DType::kF8E4M3);
}

// The most tokens whose rows are converted or quantised in their own order: kernels of sorted rows
// have theirs where the expert rows go.
int64_t tokens_in_order(const CudaPlan& plan, int64_t tokens) {
  if (plan.shared || plan.ladder.empty()) return tokens;
  int64_t most = 0;
  for (const LadderRung& rung : plan.ladder) {
    if (!rung.tile.sorted_input) most = std::min(rung.last_tokens, tokens);
    if (rung.last_tokens >= tokens) break;
  }
  return most;
}

// Of the grouping, over every rung that serves at most `tokens`.
int64_t group_bytes(const std::vector<LadderRung>& ladder,
                    const experts::DeviceExpertsProblem& problem, int64_t tokens) {
  size_t bytes = 0;
  for (const LadderRung& rung : ladder) {
    bytes = std::max(bytes, dispatch::device_group_workspace_bytes(
                                std::min(rung.last_tokens, tokens), problem.top_k,
                                problem.num_local_experts, rung.tile.tokens));
    if (rung.last_tokens >= tokens) break;
  }
  return static_cast<int64_t>(bytes);
}

size_t intermediate_bytes(const experts::DeviceExpertsProblem& problem, int64_t tokens) {
  const int64_t rows = tokens * problem.top_k;
  const DType dtype = problem.weight_dtype;
  const int64_t row = padded_row(problem.intermediate_size, dtype) * byte_size(dtype);
  const bool scaled = dtype == DType::kF8E4M3;
  const int64_t scales =
      scaled ? ceil_div(problem.intermediate_size, kScaleColumns) * int64_t{sizeof(float)} : 0;
  return static_cast<size_t>(rows * (row + scales));
}

}  // namespace

KernelBytes estimated_kernel_bytes(const CudaPlan& plan, int64_t tokens) {
  return {.routed = plan.ladder.empty() ? 0 : intermediate_bytes(plan.routed, tokens),
          .shared = plan.shared ? intermediate_bytes(*plan.shared, tokens) : 0};
}

WorkspaceBooking book_workspace(const CudaPlan& plan, int64_t tokens, const KernelBytes& kernels) {
  const MoeSpec& spec = plan.spec;
  const int64_t slots = tokens * spec.top_k;
  const int64_t row_bytes = plan.row_stride * byte_size(plan.row_dtype);
  Booking booking;
  CudaSlices slices;
  slices.live_tokens = booking.book(1, sizeof(int64_t));
  slices.gate =
      booking.book(static_cast<int64_t>(gemm::device_gate_workspace_bytes(
                       tokens, spec.hidden_size, spec.has_gate && spec.router.input_norm.enabled)),
                   1);
  if (spec.has_gate) slices.logits = booking.book(tokens * num_logits(spec), sizeof(float));
  slices.topk_ids = booking.book(slots, sizeof(int32_t));
  slices.topk_weights = booking.book(slots, sizeof(float));
  slices.given_ids = booking.book(slots, sizeof(int32_t));
  if (spec.num_zero_experts > 0) slices.identity = booking.book(tokens, sizeof(float));
  const int64_t in_order = tokens_in_order(plan, tokens);
  slices.hidden_rows = booking.book(in_order, hidden_row_bytes(plan));
  if (is_quantised(spec)) {
    const bool grouped = spec.quant.activations == ActivationScale::kGroup;
    slices.hidden_scales =
        booking.book(padded_row(in_order, DType::kF32) *
                         (grouped ? ceil_div(spec.hidden_size, kScaleColumns) : 1),
                     sizeof(float));
  }
  int64_t grouping = std::max(group_bytes(plan.ladder, plan.routed, tokens),
                              static_cast<int64_t>(dispatch::device_group_workspace_bytes(
                                  tokens, spec.top_k, 1, kLeastGroupTile)));
  if (plan.shared) {
    grouping = std::max(grouping, group_bytes(plan.shared_ladder, *plan.shared, tokens));
  }
  slices.group = booking.book(grouping, 1);
  // Routed and shared experts run one after the other.
  slices.experts = booking.book(static_cast<int64_t>(std::max(kernels.routed, kernels.shared)), 1);
  // Where sorted codes lie until the down product writes its rows.
  slices.expert_rows = booking.book(
      std::max(slots * row_bytes,
               is_quantised(spec) ? sorted_codes(slots, spec.hidden_size).bytes : int64_t{0}),
      1);
  if (plan.shared) slices.shared_rows = booking.book(tokens, row_bytes);
  if (spec.shared.mode == SharedMode::kSigmoidGate) {
    slices.shared_factor = booking.book(tokens, sizeof(float));
  }
  return {.slices = slices, .total_bytes = std::max(booking.total_bytes(), kernels.decode)};
}

}  // namespace conclave::inline v0
