#include "layer/cuda/cuda_runner.h"

#include "layer/chunks.h"
#include "layer/cuda/adapter_memory.h"
#include "layer/cuda/book_workspace.h"
#include "layer/cuda/every_row.h"
#include "layer/own_workspace.h"
#include "layer/stages/cuda/chunk.h"
#include "layer/stages/cuda/limits.h"

#include "conclave/interop/cuda.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

// All chunks of a call have these alike.
struct CallParts {
  CudaCallAdapters adapters;
  CudaCallLimits limits;
};

// Kernels bound to the addresses of the weights, and where their calls find scratch memory.
class CudaRunner final : public LayerRunner {
 public:
  CudaRunner(const Context& context, const CudaPlan& plan, const WeightsOnDevice& weights,
             const CudaRunner* like);

  size_t workspace_bytes(int64_t tokens) const override;
  // Chunks decide how many bytes are needed: run() checks, before the first of them.
  void check_workspace(std::span<const std::byte>) const override {}
  void run(const LayerCall& call) const override;

 private:
  WorkspaceBooking booking_in(std::span<const std::byte> workspace, int64_t tokens) const;
  WorkspaceBooking booking_of(std::span<const std::byte> workspace, const RankCounts& counts) const;
  // Has the booking's slices as long as that lives.
  CudaChunk chunk_at_place(const LayerCall& call, const CallParts& parts, const TokenChunk& at,
                           const WorkspaceBooking& booking) const;
  template <class Visit>
  void each_chunk(const LayerCall& call, const CallParts& parts, const Visit& visit) const;
  template <class Visit>
  void each_gathered_chunk(const LayerCall& call, const CallParts& parts, const Visit& visit) const;

  const CudaPlan& plan_;
  const WeightsOnDevice& weights_;
  std::shared_ptr<const EveryRowIds> every_row_;
  CudaKernels kernels_;
  std::vector<WorkspaceBooking> bookings_;  // ascending, the last for the most tokens
};

std::shared_ptr<const EveryRowIds> every_row_for(const Context& context, const CudaPlan& plan,
                                                 const WeightsOnDevice& weights,
                                                 std::shared_ptr<const EveryRowIds> made) {
  if (made != nullptr && serves(*made, plan)) return made;
  return std::make_shared<EveryRowIds>(make_every_row(context, plan, weights.stream()));
}

CudaRunner::CudaRunner(const Context& context, const CudaPlan& plan, const WeightsOnDevice& weights,
                       const CudaRunner* like)
    : plan_(plan),
      weights_(weights),
      every_row_(
          every_row_for(context, plan, weights, like != nullptr ? like->every_row_ : nullptr)),
      kernels_(make_cuda_kernels(plan, weights.own)),
      bookings_(book_every_rung(plan, plan.options.max_tokens)) {}

// The booking of the call's rung, or, if the caller's workspace is smaller, one for just `tokens`.
WorkspaceBooking CudaRunner::booking_in(std::span<const std::byte> workspace,
                                        int64_t tokens) const {
  const auto serves = [tokens](const WorkspaceBooking& it) { return it.calls.last >= tokens; };
  const WorkspaceBooking& planned = *std::find_if(bookings_.begin(), bookings_.end() - 1, serves);
  if (planned.total_bytes <= workspace.size()) return planned;
  const int64_t least = std::max<int64_t>(tokens, 1);
  WorkspaceBooking smaller = book_workspace(plan_, {.first = least, .last = least});
  check_workspace_size(workspace, smaller.total_bytes);
  return smaller;
}

size_t CudaRunner::workspace_bytes(int64_t tokens) const {
  const int64_t least = std::clamp<int64_t>(tokens, 1, plan_.options.max_tokens);
  return conclave::workspace_bytes(plan_, least);
}

// A call with limits does this before its chunks run: a budget routes all of them once.
template <class ForEachChunk>
void run_limits(const LayerCall& call, const ForEachChunk& for_each_chunk) {
  for_each_chunk([&](const CudaChunk& chunk, const TokenChunk& at) {
    if (at.begin == 0) begin_limits(chunk.at(CudaStage::kRoute), call.args);
    if (call.args.expert_budget != 0) count_cuda_chunk(chunk, chunk_of(call.args, at));
    const bool is_last = at.begin + at.count == call.tokens;
    if (call.args.expert_budget != 0 && is_last) {
      end_budget(chunk.at(CudaStage::kRoute), call.args);
    }
  });
}

CudaCallAdapters adapters_of(const LayerCall& call) {
  if (call.adapters == nullptr || call.adapters->empty()) return {};
  const int32_t place = call.args.adapter == kNoAdapter
                            ? -1
                            : static_cast<int32_t>(call.adapters->find(call.args.adapter));
  return {.table = static_cast<const CudaAdapterTable*>(call.adapters->table.get()),
          .mark = place + 1};
}

// The same is done if rows gather, for a chunk of so many tokens of each rank.
WorkspaceBooking CudaRunner::booking_of(std::span<const std::byte> workspace,
                                        const RankCounts& counts) const {
  if (bookings_.back().total_bytes <= workspace.size()) return bookings_.back();
  WorkspaceBooking smaller = book_gathered(plan_, counts[plan_.parallel.ep_rank], counts.sum());
  check_workspace_size(workspace, smaller.total_bytes);
  return smaller;
}

CudaChunk CudaRunner::chunk_at_place(const LayerCall& call, const CallParts& parts,
                                     const TokenChunk& at, const WorkspaceBooking& booking) const {
  return {.plan = plan_,
          .weights = weights_.own,
          .every_row = *every_row_,
          .kernels = kernels_,
          .scratch = CudaScratch(call.workspace.data(), booking.slices, {}),
          .begin = at.begin,
          .count = at.count,
          .is_whole_call = call.chunks == 1,
          .counters = weights_.side->counters.as<CudaCounters>(),
          .adapters = parts.adapters,
          .stream = to_cuda(call.args.stream),
          .limits = parts.limits};
}

// Chunks have one of two lengths; both must fit before the first chunk runs.
template <class Visit>
void CudaRunner::each_chunk(const LayerCall& call, const CallParts& parts,
                            const Visit& visit) const {
  const int64_t shorter = call.chunks == 0 ? 0 : call.tokens / call.chunks;
  const WorkspaceBooking of_shorter = booking_in(call.workspace, shorter);
  const bool all_alike = call.chunks == 0 || call.tokens % call.chunks == 0;
  const WorkspaceBooking of_longer =
      all_alike ? of_shorter : booking_in(call.workspace, shorter + 1);
  for (int64_t index = 0; index < call.chunks; ++index) {
    const TokenChunk at = chunk_at(call.tokens, call.chunks, index);
    visit(chunk_at_place(call, parts, at, at.count > shorter ? of_longer : of_shorter), at);
  }
}

// No rank has a larger chunk than the first: what fits that fits all.
template <class Visit>
void CudaRunner::each_gathered_chunk(const LayerCall& call, const CallParts& parts,
                                     const Visit& visit) const {
  for (int64_t index = 0; index < call.chunks; ++index) {
    RankCounts counts = call.rank_tokens;
    for (int64_t& count : counts.all()) count = chunk_at(count, call.chunks, index).count;
    const TokenChunk at = chunk_at(call.tokens, call.chunks, index);
    const WorkspaceBooking booking = booking_of(call.workspace, counts);
    CudaChunk chunk = chunk_at_place(call, parts, at, booking);
    chunk.rank_counts = counts;
    visit(chunk, at);
  }
}

void CudaRunner::run(const LayerCall& call) const {
  const CallParts parts{
      .adapters = adapters_of(call),
      .limits = call.chunks == 0 ? CudaCallLimits() : limits_of_call(plan_, call.args)};
  const auto for_each_chunk = [&](const auto& visit) {
    if (plan_.gathers_rows()) return each_gathered_chunk(call, parts, visit);
    each_chunk(call, parts, visit);
  };
  WeightFence::Reading reading(weights_.side->fence, to_cuda(call.args.stream));
  if (parts.limits.any) run_limits(call, for_each_chunk);
  for_each_chunk([&](const CudaChunk& chunk, const TokenChunk& at) {
    run_cuda_chunk(chunk, chunk_of(call.args, at));
  });
  reading.end();
}

}  // namespace

std::unique_ptr<LayerRunner> make_cuda_runner(const Context& context, const CudaPlan& plan,
                                              const WeightsOnDevice& weights,
                                              const LayerRunner* like) {
  return std::make_unique<CudaRunner>(context, plan, weights, static_cast<const CudaRunner*>(like));
}

}  // namespace conclave::inline v0
