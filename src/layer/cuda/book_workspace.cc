#include "layer/cuda/book_workspace.h"

#include "core/checked.h"
#include "dispatch/cuda/group.h"
#include "dispatch/cuda/window_sums.h"
#include "gemm/cuda/gate_product.h"
#include "layer/cuda/gathered_row.h"
#include "layer/cuda/own_row_form.h"
#include "layer/cuda/row_format.h"
#include "routing/cuda/call_bans.h"

#include "conclave/error.h"

#include <algorithm>
#include <vector>

namespace conclave::inline v0 {
namespace {

using enum CudaBuffer;

// Alignment of slices of device memory: whole lines of every kind of copy.
constexpr int64_t kSliceBytes = 256;

// The bytes of every buffer, whether or not a stage of the plan touches it.
class Sizes {
 public:
  Sizes() { set(kCounters, kWorkspaceCounterBytes, 1); }

  void set(CudaBuffer buffer, int64_t count, int64_t element_bytes) {
    const auto bytes = checked_mul(count, element_bytes);
    if (!bytes) throw Error(ErrorCode::kSizeOverflow, "the workspace exceeds 63 bits");
    bytes_[static_cast<size_t>(buffer)] = round_up(*bytes, kSliceBytes);
  }
  int64_t of(size_t buffer) const { return bytes_[buffer]; }

 private:
  std::array<int64_t, kCudaBuffers> bytes_{};
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

// The parts that take adapters.
std::vector<const CudaMlpPlan*> adapted_parts(const CudaPlan& plan) {
  std::vector<const CudaMlpPlan*> parts;
  for (const CudaMlpPlan* part : {&plan.routed, plan.shared ? &*plan.shared : nullptr}) {
    if (part != nullptr && !part->adapters.empty()) parts.push_back(part);
  }
  return parts;
}

size_t adapted_bytes(const CudaPlan& plan, int64_t tokens, int64_t routed_tokens) {
  size_t most = 0;
  for (const CudaMlpPlan* part : adapted_parts(plan)) {
    const bool is_routed = part == &plan.routed;
    for_each_rung(part->adapters, {.first = 1, .last = is_routed ? routed_tokens : tokens},
                  [&](const AdapterRung& rung, int64_t last) {
                    most = std::max(most, rung.row->workspace_bytes(part->problem, last));
                  });
  }
  return most;
}

// Kinds of experts run one after the other and share this memory.
size_t experts_bytes(const CudaPlan& plan, int64_t tokens, int64_t routed_tokens) {
  size_t most = std::max(kernel_bytes(plan.routed, routed_tokens),
                         adapted_bytes(plan, tokens, routed_tokens));
  if (plan.shared) most = std::max(most, kernel_bytes(*plan.shared, tokens));
  if (plan.residual) most = std::max(most, kernel_bytes(*plan.residual, tokens));
  return most;
}

// Scratch of the single launch, for those of the calls that it takes.
size_t decode_bytes(const CudaPlan& plan, const CallRange& calls) {
  if (plan.decode_tokens == 0 || calls.first > plan.decode_tokens) return 0;
  return plan.decode_row->workspace_bytes(plan.routed.problem, plan.decode_tokens);
}

// Whether rows become values of codes before kernels read them.
bool makes_values(const CudaMlpPlan& part, const experts::LadderRung& rung) {
  return part.quantises() && experts::reads_values(rung, part.problem);
}

// The most tokens whose rows are not copied into sorted order, or become values before that.
// Experts that every row uses may be a single one, whose rows are in order already.
int64_t unsorted_tokens(const CudaMlpPlan& part, const CallRange& calls) {
  if (part.problem.top_k == part.problem.num_local_experts) return calls.last;
  int64_t most = 0;
  for_each_rung(part.ladder, calls, [&](const experts::LadderRung& rung, int64_t tokens) {
    if (!rung.tile.sorted_input || makes_values(part, rung)) most = tokens;
  });
  return most;
}

// Bytes for the rows of slots: their results, and before them, in the same place, sorted rows or
// their codes. Rows that the kernel adds up have no results.
int64_t output_bytes(const CudaMlpPlan& part, const CallRange& calls) {
  const int64_t top_k = part.problem.top_k;
  const int64_t row_bytes = part.row_stride * byte_size(part.row_dtype);
  const bool has_adapters = !part.adapters.empty();
  const auto of_sorted = [&](const experts::LadderRung& rung, int64_t slots) {
    return part.quantises() && !makes_values(part, rung)
               ? sorted_codes(slots, part.problem.hidden_size).bytes
               : slots * row_bytes;
  };
  if (part.ladder.empty()) return calls.last * top_k * row_bytes;
  int64_t most = 0;
  for_each_rung(part.ladder, calls, [&](const experts::LadderRung& rung, int64_t tokens) {
    const int64_t slots = tokens * top_k;
    if (rung.tile.sorted_input) most = std::max(most, of_sorted(rung, slots));
    if (!rung.adds_rows || has_adapters) most = std::max(most, slots * row_bytes);
  });
  return most;
}

bool reads_some_values(const CudaMlpPlan& part) {
  return std::ranges::any_of(part.ladder, [&](const experts::LadderRung& rung) {
    return experts::reads_values(rung, part.problem);
  });
}

void size_mlp(Sizes& sizes, const CudaMlpPlan& part, const MlpBuffers& buffers,
              const CallRange& calls, int64_t rows_per_token = 1) {
  const experts::ExpertsProblem& problem = part.problem;
  const int64_t unsorted = unsorted_tokens(part, calls) * rows_per_token;
  const int64_t values = part.row_stride * byte_size(part.row_dtype);
  if (part.quantises()) {
    const bool grouped = problem.quant.activations == ActivationScale::kGroup;
    const int64_t scales = grouped ? ceil_div(problem.hidden_size, kScaleColumns) : 1;
    const int64_t codes = padded_codes(problem.hidden_size);
    sizes.set(buffers.rows, unsorted, reads_some_values(part) ? std::max(codes, values) : codes);
    sizes.set(buffers.scales, padded_row(unsorted, DType::kF32) * scales, sizeof(float));
  } else if (!part.has_own_rows()) {
    // Rows of experts' own have the kernels' type.
    sizes.set(buffers.rows, unsorted, values);
  }
  sizes.set(buffers.output, output_bytes(part, calls), 1);
  sizes.set(buffers.sums,
            tokens_added(part.ladder, calls) * padded_row(problem.hidden_size, DType::kF32),
            sizeof(float));
}

// Bytes of a row of a slot: as its expert reads it, or weighed.
int64_t slot_row_bytes(const CudaMlpPlan& part) {
  if (!part.has_own_rows()) return part.problem.hidden_size * int64_t{sizeof(float)};
  const OwnRowForm form = own_row_form(part);
  return form.width * byte_size(form.dtype);
}

void size_routing(Sizes& sizes, const CudaPlan& plan, int64_t tokens) {
  const MoeSpec& spec = plan.spec;
  const int64_t choices = tokens * spec.top_k;
  const int64_t slots = tokens * plan.num_slots();
  // All calls have one size of it, so that it has one place for all chunks of any of them.
  sizes.set(kCallBans,
            static_cast<int64_t>(routing::DeviceCallBans::bytes(
                spec.num_experts, spec.num_experts + spec.num_zero_experts)),
            1);
  sizes.set(kLiveTokens, 1, sizeof(int64_t));
  sizes.set(kGate,
            static_cast<int64_t>(gemm::device_gate_workspace_bytes(tokens, spec.hidden_size,
                                                                   spec.router.input_norm.enabled)),
            1);
  sizes.set(kLogits, tokens * num_logits(spec), sizeof(float));
  sizes.set(kTopkIds, slots, sizeof(int32_t));
  sizes.set(kTopkWeights, slots, sizeof(float));
  for (const CudaBuffer ids : {kGivenIds, kPhysicalIds, kRouterIds, kLimitedIds}) {
    sizes.set(ids, choices, sizeof(int32_t));
  }
  sizes.set(kRouterWeights, choices, sizeof(float));
  sizes.set(kLimitedWeights, choices, sizeof(float));
  sizes.set(kIdentity, tokens, sizeof(float));
  sizes.set(kSharedFactor, tokens * spec.shared.count, sizeof(float));
  sizes.set(kMixLogits, tokens * 2, sizeof(float));
  sizes.set(kMix, tokens, sizeof(float));
}

// Routed experts may have the tokens of all ranks, others have this rank's.
const CallRange& calls_of(const CudaPlan& plan, const CudaMlpPlan& part, const CallRange& calls,
                          const CallRange& routed) {
  return &part == &plan.routed ? routed : calls;
}

// Tiles of rows with adapters may be narrower than the ladder's.
int64_t adapted_group_bytes(const CudaMlpPlan& part, const CallRange& calls) {
  size_t bytes = 0;
  for_each_rung(part.adapters, calls, [&](const AdapterRung& rung, int64_t tokens) {
    bytes = std::max(
        bytes, dispatch::device_group_workspace_bytes(
                   tokens, part.problem.top_k, part.problem.num_local_experts, rung.tile.tokens));
  });
  return static_cast<int64_t>(bytes);
}

void size_adapters(Sizes& sizes, const CudaPlan& plan, const CallRange& calls,
                   const CallRange& routed) {
  if (!plan.takes_adapters()) return;
  int64_t slots = 1;
  int64_t group = 0;
  int64_t input = 0;
  int64_t scales = 0;
  for (const CudaMlpPlan* part : adapted_parts(plan)) {
    const experts::ExpertsProblem& problem = part->problem;
    const CallRange& tokens = calls_of(plan, *part, calls, routed);
    const int64_t own_slots = tokens.last * problem.top_k;
    const int64_t rows =
        tokens.last * (part->has_own_rows() || plan.weighs_rows ? problem.top_k : 1);
    const int64_t width =
        std::max(padded_codes(problem.hidden_size), part->row_stride * byte_size(part->row_dtype));
    slots = std::max(slots, own_slots);
    group = std::max(group, adapted_group_bytes(*part, tokens));
    input = std::max(input, rows * width);
    scales = std::max(scales,
                      padded_row(rows, DType::kF32) * ceil_div(problem.hidden_size, kScaleColumns));
  }
  const int64_t terms = experts::most_adapter_terms(plan.options.max_adapter_rank);
  sizes.set(kAdapterMarks, calls.last, sizeof(int32_t));
  sizes.set(kAdapterIds, slots, sizeof(int32_t));
  sizes.set(kOtherIds, slots, sizeof(int32_t));
  sizes.set(kAdapterGroup, group, 1);
  sizes.set(kAdapterInput, input, 1);
  sizes.set(kAdapterScales, scales, sizeof(float));
  for (const CudaBuffer rows : {kAdapterUp, kAdapterDown}) {
    sizes.set(rows, slots, sizeof(experts::RowFactors));
  }
  sizes.set(kAdapterUpTerms, slots * terms, sizeof(float));
  sizes.set(kAdapterDownTerms, slots * terms / 2, sizeof(float));
  sizes.set(kAdapterOut, std::min(calls.last, plan.decode_tokens) * plan.spec.hidden_size,
            sizeof(float));
}

// Rows of all ranks, and what comes home to this one.
void size_gathered(Sizes& sizes, const CudaPlan& plan, int64_t own, int64_t gathered) {
  const int64_t slots = gathered * plan.num_slots();
  const int64_t sum_columns = padded_row(plan.routed.problem.hidden_size, DType::kF32);
  sizes.set(kGatheredRows, gathered, most_gathered_row_bytes(plan));
  sizes.set(kGatheredIds, slots, sizeof(int32_t));
  sizes.set(kGatheredWeights, slots, sizeof(float));
  sizes.set(kGatheredMarks, gathered, sizeof(int32_t));
  const int64_t own_columns = dispatch::window_sum_columns(plan.routed.problem.hidden_size);
  sizes.set(kExpertPart, std::max(gathered * sum_columns, own * own_columns), sizeof(float));
  sizes.set(kOtherParts, own * (plan.parallel.ep_size - 1) * sum_columns, sizeof(float));
  sizes.set(kExpertSums, own * sum_columns, sizeof(float));
}

// `calls` are of this rank's tokens; where rows gather, its routed experts have `routed` tokens.
void size_experts(Sizes& sizes, const CudaPlan& plan, const CallRange& calls,
                  const CallRange& routed) {
  int64_t grouping = std::max(group_bytes(plan.routed, routed),
                              static_cast<int64_t>(dispatch::device_group_workspace_bytes(
                                  routed.last, plan.num_slots(), 1, kLeastGroupTile)));
  if (plan.shared) grouping = std::max(grouping, group_bytes(*plan.shared, calls));
  for (const CudaMlpPlan* part : adapted_parts(plan)) {
    grouping = std::max(grouping, adapted_group_bytes(*part, calls_of(plan, *part, calls, routed)));
  }
  if (plan.residual) grouping = std::max(grouping, group_bytes(*plan.residual, calls));
  sizes.set(kGroup, grouping, 1);
  sizes.set(kExperts, static_cast<int64_t>(experts_bytes(plan, calls.last, routed.last)), 1);
  size_mlp(sizes, plan.routed, kRoutedBuffers, routed, plan.rows_per_token());
  if (plan.shared) {
    const int64_t rows_per_token = plan.shared->has_own_rows() ? plan.shared->problem.top_k : 1;
    size_mlp(sizes, *plan.shared, kSharedBuffers, calls, rows_per_token);
    sizes.set(kSharedOwn, calls.last * rows_per_token, slot_row_bytes(*plan.shared));
  }
  if (plan.residual) size_mlp(sizes, *plan.residual, kResidualBuffers, calls);
  const MoeSpec& spec = plan.spec;
  sizes.set(kWeighted, routed.last * plan.rows_per_token(), slot_row_bytes(plan.routed));
  sizes.set(kLatent, calls.last * spec.latent.size, sizeof(float));
  sizes.set(kProjected, calls.last * spec.hidden_size, sizeof(float));
  const int64_t sum_columns = calls.last * padded_row(spec.hidden_size, DType::kF32);
  for (const CudaBuffer rows : {kRankPart, kRankSharedPart, kRankSum, kRankSharedSum}) {
    sizes.set(rows, sum_columns, sizeof(float));
  }
  // Also this rank's part, in the units of a window.
  sizes.set(kRankSum, calls.last * dispatch::window_sum_columns(spec.hidden_size), sizeof(float));
  size_adapters(sizes, plan, calls, routed);
  sizes.set(kOneLaunch, static_cast<int64_t>(decode_bytes(plan, calls)), 1);
}

// The counters keep their place even if no single launch is declared: another layer's may use the
// same workspace.
WorkspaceBooking book(const CudaPlan& plan, const CallRange& calls, const CallRange& routed) {
  Sizes sizes;
  size_routing(sizes, plan, calls.last);
  size_experts(sizes, plan, calls, routed);
  if (plan.gathers_rows()) size_gathered(sizes, plan, calls.last, routed.last);
  BufferSet touched = kCounters;
  for (const Stage& stage : plan.stages.list) touched = touched | stage.reads | stage.writes;
  WorkspaceLayout layout;
  CudaSlices slices{};
  for (size_t i = 0; i < kCudaBuffers; ++i) {
    if (touched.has(i)) slices[i] = layout.book_bytes(sizes.of(i), 1);
  }
  return {.calls = routed, .slices = slices, .total_bytes = layout.total_bytes()};
}

}  // namespace

WorkspaceBooking book_workspace(const CudaPlan& plan, const CallRange& calls) {
  return book(plan, calls, {.first = calls.first, .last = plan.gathered(calls.last)});
}

WorkspaceBooking book_gathered(const CudaPlan& plan, int64_t own, int64_t all) {
  return book(plan, {.first = 1, .last = std::max<int64_t>(own, 1)},
              {.first = 1, .last = std::max<int64_t>(all, 1)});
}

std::vector<WorkspaceBooking> book_every_rung(const CudaPlan& plan, int64_t max_tokens) {
  if (plan.gathers_rows()) return {book_workspace(plan, {.first = 1, .last = max_tokens})};
  std::vector<WorkspaceBooking> bookings;
  for (const CallRange& calls : calls_by_rung(plan.routed.ladder, max_tokens)) {
    bookings.push_back(book_workspace(plan, calls));
  }
  return bookings;
}

size_t workspace_bytes(const CudaPlan& plan, int64_t max_tokens) {
  if (plan.gathers_rows()) {
    const int64_t others = plan.options.max_tokens * (plan.parallel.ep_size - 1);
    return book_gathered(plan, max_tokens, max_tokens + others).total_bytes;
  }
  size_t most = 0;
  for (const WorkspaceBooking& booking : book_every_rung(plan, max_tokens)) {
    most = std::max(most, booking.total_bytes);
  }
  return most;
}

}  // namespace conclave::inline v0
