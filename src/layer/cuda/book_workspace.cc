#include "layer/cuda/book_workspace.h"

#include "core/checked.h"
#include "dispatch/cuda/group.h"
#include "gemm/cuda/gate_product.h"
#include "layer/cuda/row_format.h"

#include "conclave/error.h"

#include <algorithm>

namespace conclave::inline v0 {
namespace {

using enum CudaBuffer;

// Alignment of slices of device memory: whole lines of every kind of copy.
constexpr int64_t kSliceBytes = 256;

// Books buffers at multiples of 256 bytes, behind the counters, in the order of the calls.
class Booking {
 public:
  Booking() { static_cast<void>(layout_.book_bytes(kWorkspaceCounterBytes, 1)); }

  void book(CudaBuffer buffer, int64_t count, int64_t element_bytes) {
    const auto bytes = checked_mul(count, element_bytes);
    if (!bytes) throw Error(ErrorCode::kSizeOverflow, "the workspace exceeds 63 bits");
    slices_[static_cast<size_t>(buffer)] = layout_.book_bytes(round_up(*bytes, kSliceBytes), 1);
  }
  const CudaSlices& slices() const { return slices_; }
  size_t total_bytes() const { return layout_.total_bytes(); }

 private:
  WorkspaceLayout layout_;
  CudaSlices slices_{};
};

int64_t group_bytes(const CudaMlpPlan& part, const CallRange& calls) {
  size_t bytes = 0;
  for_each_rung(part.ladder, calls, [&](const experts::LadderRung& rung, int64_t tokens) {
    const int32_t tile = rung.skewed_row == nullptr
                             ? rung.tile.tokens
                             : std::min(rung.tile.tokens, rung.skewed_tile.tokens);
    bytes = std::max(bytes, dispatch::device_group_workspace_bytes(
                                tokens, part.problem.top_k, part.problem.num_local_experts, tile));
  });
  return static_cast<int64_t>(bytes);
}

// The most that the kernels of one kind of experts need.
size_t kernel_bytes(const CudaMlpPlan& part, int64_t tokens) {
  size_t most = 0;
  for_each_rung(part.ladder, {.first = 1, .last = tokens},
                [&](const experts::LadderRung& rung, int64_t last) {
                  for (const experts::DeviceKernelRow* row : {rung.row, rung.skewed_row}) {
                    if (row == nullptr) continue;
                    most = std::max(most, row->workspace_bytes(part.problem, last));
                  }
                });
  return most;
}

// Kinds of experts run one after the other and share this memory.
size_t experts_bytes(const CudaPlan& plan, int64_t tokens) {
  size_t most = kernel_bytes(plan.routed, tokens);
  if (plan.shared) most = std::max(most, kernel_bytes(*plan.shared, tokens));
  if (plan.residual) most = std::max(most, kernel_bytes(*plan.residual, tokens));
  return most;
}

// The single launch uses the front of the workspace, with its counters, and no slice.
size_t decode_bytes(const CudaPlan& plan) {
  if (plan.decode_tokens == 0) return 0;
  return plan.decode_row->workspace_bytes(plan.routed.problem, plan.decode_tokens);
}

// The most tokens whose rows are not copied into sorted order. Experts that every row uses may be a
// single one, whose rows are in order already.
int64_t unsorted_tokens(const CudaMlpPlan& part, const CallRange& calls) {
  if (part.problem.top_k == part.problem.num_local_experts) return calls.last;
  int64_t most = 0;
  for_each_rung(part.ladder, calls, [&](const experts::LadderRung& rung, int64_t tokens) {
    if (!rung.tile.sorted_input) most = tokens;
  });
  return most;
}

// Bytes for the rows of slots: their results, and before them, in the same place, sorted rows or
// their codes. Rows that the kernel adds up have no results.
int64_t output_bytes(const CudaMlpPlan& part, const CallRange& calls) {
  const int64_t top_k = part.problem.top_k;
  const int64_t row_bytes = part.row_stride * byte_size(part.row_dtype);
  const auto of_sorted = [&](int64_t slots) {
    return part.quantises() ? sorted_codes(slots, part.problem.hidden_size).bytes
                            : slots * row_bytes;
  };
  if (part.ladder.empty()) return calls.last * top_k * row_bytes;
  int64_t most = 0;
  for_each_rung(part.ladder, calls, [&](const experts::LadderRung& rung, int64_t tokens) {
    const int64_t slots = tokens * top_k;
    if (rung.tile.sorted_input) most = std::max(most, of_sorted(slots));
    if (!rung.adds_rows) most = std::max(most, slots * row_bytes);
  });
  return most;
}

void book_mlp(Booking& booking, const CudaMlpPlan& part, const MlpBuffers& buffers,
              const CallRange& calls, int64_t rows_per_token = 1) {
  const experts::ExpertsProblem& problem = part.problem;
  const int64_t unsorted = unsorted_tokens(part, calls) * rows_per_token;
  if (part.quantises()) {
    const bool grouped = problem.quant.activations == ActivationScale::kGroup;
    const int64_t scales = grouped ? ceil_div(problem.hidden_size, kScaleColumns) : 1;
    booking.book(buffers.rows, unsorted, padded_codes(problem.hidden_size));
    booking.book(buffers.scales, padded_row(unsorted, DType::kF32) * scales, sizeof(float));
  } else {
    booking.book(buffers.rows, unsorted, part.row_stride * byte_size(part.row_dtype));
  }
  booking.book(buffers.output, output_bytes(part, calls), 1);
  booking.book(buffers.sums,
               tokens_added(part.ladder, calls) * padded_row(problem.hidden_size, DType::kF32),
               sizeof(float));
}

void book_routing(Booking& booking, const CudaPlan& plan, int64_t tokens) {
  const MoeSpec& spec = plan.spec;
  const int64_t choices = tokens * spec.top_k;
  const int64_t slots = tokens * plan.num_slots();
  const bool normed = spec.has_gate && spec.router.input_norm.enabled;
  booking.book(kLiveTokens, 1, sizeof(int64_t));
  booking.book(
      kGate,
      static_cast<int64_t>(gemm::device_gate_workspace_bytes(tokens, spec.hidden_size, normed)), 1);
  if (spec.has_gate) booking.book(kLogits, tokens * num_logits(spec), sizeof(float));
  booking.book(kTopkIds, slots, sizeof(int32_t));
  booking.book(kTopkWeights, slots, sizeof(float));
  booking.book(kGivenIds, choices, sizeof(int32_t));
  if (plan.part.has_replicas()) booking.book(kPhysicalIds, choices, sizeof(int32_t));
  if (plan.router_writes_choices) {
    booking.book(kRouterIds, choices, sizeof(int32_t));
    booking.book(kRouterWeights, choices, sizeof(float));
  }
  if (spec.num_zero_experts > 0) booking.book(kIdentity, tokens, sizeof(float));
}

void book_factors(Booking& booking, const MoeSpec& spec, int64_t tokens) {
  const SharedMode mode = spec.shared.mode;
  if (mode == SharedMode::kNone || mode == SharedMode::kAdd) return;
  booking.book(kSharedFactor, tokens * spec.shared.count, sizeof(float));
  if (mode != SharedMode::kSoftmaxMix) return;
  booking.book(kMixLogits, tokens * 2, sizeof(float));
  booking.book(kMix, tokens, sizeof(float));
}

}  // namespace

WorkspaceBooking book_workspace(const CudaPlan& plan, const CallRange& calls) {
  const MoeSpec& spec = plan.spec;
  const int64_t tokens = calls.last;
  Booking booking;
  book_routing(booking, plan, tokens);
  book_factors(booking, spec, tokens);
  int64_t grouping = std::max(group_bytes(plan.routed, calls),
                              static_cast<int64_t>(dispatch::device_group_workspace_bytes(
                                  tokens, plan.num_slots(), 1, kLeastGroupTile)));
  if (plan.shared) grouping = std::max(grouping, group_bytes(*plan.shared, calls));
  if (plan.residual) grouping = std::max(grouping, group_bytes(*plan.residual, calls));
  booking.book(kGroup, grouping, 1);
  booking.book(kExperts, static_cast<int64_t>(experts_bytes(plan, tokens)), 1);
  book_mlp(booking, plan.routed, kRoutedBuffers, calls, plan.rows_per_token());
  if (plan.shared) book_mlp(booking, *plan.shared, kSharedBuffers, calls);
  if (plan.residual) book_mlp(booking, *plan.residual, kResidualBuffers, calls);
  if (plan.weighs_rows) {
    booking.book(kWeighted, tokens * plan.rows_per_token() * expert_width(spec), sizeof(float));
  }
  if (spec.latent.size != 0) {
    booking.book(kLatent, tokens * spec.latent.size, sizeof(float));
    booking.book(kProjected, tokens * spec.hidden_size, sizeof(float));
  }
  return {.calls = calls,
          .slices = booking.slices(),
          .total_bytes = std::max(booking.total_bytes(), decode_bytes(plan))};
}

std::vector<WorkspaceBooking> book_every_rung(const CudaPlan& plan, int64_t max_tokens) {
  std::vector<WorkspaceBooking> bookings;
  for (const CallRange& calls : calls_by_rung(plan.routed.ladder, max_tokens)) {
    bookings.push_back(book_workspace(plan, calls));
  }
  return bookings;
}

size_t workspace_bytes(const CudaPlan& plan, int64_t max_tokens) {
  size_t most = 0;
  for (const WorkspaceBooking& booking : book_every_rung(plan, max_tokens)) {
    most = std::max(most, booking.total_bytes);
  }
  return most;
}

}  // namespace conclave::inline v0
