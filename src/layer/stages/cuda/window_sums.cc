#include "layer/stages/cuda/window_sums.h"

#include "comm/nccl/device_steps.h"
#include "comm/one_launch.h"
#include "core/rank_counts.h"
#include "core/row_stride.h"
#include "dispatch/cuda/window_sums.h"
#include "layer/cuda/row_format.h"

#include "conclave/comm.h"
#include "conclave/interop/cuda.h"

#include <algorithm>

namespace conclave::inline v0 {
namespace {

using enum CudaBuffer;

// The rows of each rank among those that this rank's part has.
struct RowsOfRanks {
  explicit RowsOfRanks(int32_t ranks) : first(ranks), count(ranks) {}

  RankCounts first;
  RankCounts count;
};

// False where a message has no room in a window: every rank knows the lengths of all.
bool add_up(const CudaChunk& chunk, Communicator& ranks, const RowsOfRanks& rows,
            dispatch::WindowSums sums, const char* phase) {
  comm::OneLaunch* const able = comm::find_one_launch(&ranks);
  if (able == nullptr) return false;
  const int32_t own = ranks.rank();
  const auto bytes_of = [&](int32_t rank) {
    return dispatch::window_sum_bytes(rows.count[rank], sums.part.hidden_size, sums.travels);
  };
  RankCounts send(ranks.size());
  RankCounts recv(ranks.size());
  for (int32_t rank = 0; rank < ranks.size(); ++rank) {
    if (bytes_of(rank) > able->window_bytes()) return false;
    if (rank == own) continue;
    send[rank] = bytes_of(rank);
    recv[rank] = bytes_of(own);
  }
  // Rows that are sums already have the other type's kernel.
  if (sums.part.expert_rows == nullptr) sums.part.expert_dtype = chunk.plan.routed.row_dtype;
  sums.rank = own;
  sums.first_rows = rows.first.all();
  sums.num_rows = rows.count.all();
  const Stream stream = to_stream(chunk.stream);
  const CommHandle handle = able->begin_kernel(
      {.send_bytes = send.all(), .recv_bytes = recv.all(), .dtype = sums.travels},
      dispatch::WindowSumKernel(sums), stream);
  ranks.wait_on(stream, handle, ranks.timeout(), phase);
  return true;
}

}  // namespace

std::optional<RoutedRows> sum_experts_at_once(const CudaChunk& chunk,
                                              const dispatch::DeviceCombineArgs& part,
                                              const LiveRows& live, const TensorView& out) {
  const CudaPlan& plan = chunk.plan;
  RoutedRows sums{.dtype = DType::kF32, .columns = part.hidden_size};
  dispatch::WindowSums args{
      .part = part, .travels = plan.part_dtype(), .own = chunk.scratch.at<std::byte>(kExpertPart)};
  if (out.data == nullptr) {
    sums.form = RoutedRows::Form::kAreSums;
    sums.data = chunk.scratch.at<float>(kExpertSums);
    // Norms take rows without padding.
    const bool is_latent = plan.spec.latent.size != 0;
    sums.stride = is_latent ? sums.columns : padded_row(sums.columns, DType::kF32);
  } else {
    sums.form = RoutedRows::Form::kAreOutput;
    sums.data = out.data;
    sums.dtype = out.dtype;
    sums.stride = row_stride(out);
    args.scale = static_cast<float>(plan.spec.output_scale);
    args.live_tokens = live.tokens;
  }
  args.out = const_cast<void*>(sums.data);
  args.out_dtype = sums.dtype;
  args.out_stride = sums.stride;
  const RankCounts& counts = chunk.rank_counts;
  RowsOfRanks rows(counts.ranks());
  for (int32_t rank = 0; rank < counts.ranks(); ++rank) {
    rows.first[rank] = counts.sum_before(rank);
    rows.count[rank] = counts[rank];
  }
  if (!add_up(chunk, *plan.part.expert_communicator, rows, args, "forward: bring the sums home")) {
    return {};
  }
  return sums;
}

bool sum_slices_at_once(const CudaChunk& chunk, const dispatch::DeviceCombineArgs& part,
                        const LiveRows& live, const CudaOutputs& outputs) {
  if (!outputs.shared.empty()) return false;
  Communicator& ranks = *chunk.plan.part.tensor_communicator;
  // Longer sums go by blocks, of which each rank adds up one and gives it to all.
  const int64_t bytes = dispatch::window_sum_bytes(chunk.count, part.hidden_size, DType::kF32);
  if (bytes * (ranks.size() - 1) > comm::kAtOnceBytes) return false;
  RowsOfRanks rows(ranks.size());
  std::ranges::fill(rows.count.all(), chunk.count);
  return add_up(chunk, ranks, rows,
                {.part = part,
                 .own = chunk.scratch.at<std::byte>(kRankSum),
                 .live_tokens = live.tokens,
                 .out = outputs.out.data,
                 .out_dtype = outputs.out.dtype,
                 .out_stride = row_stride(outputs.out)},
                "forward: add up the slices");
}

dispatch::DeviceCombineArgs made_part(const CudaChunk& chunk, const TensorView& rows) {
  return {.num_tokens = chunk.count,
          .routed_rows = static_cast<const float*>(rows.data),
          .routed_row_stride = row_stride(rows),
          .hidden_size = chunk.plan.spec.hidden_size};
}

}  // namespace conclave::inline v0
