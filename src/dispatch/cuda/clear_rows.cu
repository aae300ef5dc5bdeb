#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "dispatch/cuda/clear_rows.h"

namespace conclave::inline v0::dispatch {
namespace {

constexpr int kClearThreads = 256;
constexpr int64_t kClearWarps = kClearThreads / 32;

__device__ __forceinline__ void clear_row(char* row, int64_t bytes, int64_t lane) {
  if (reinterpret_cast<uintptr_t>(row) % 16 == 0 && bytes % 16 == 0) {
    auto* parts = reinterpret_cast<uint4*>(row);
    for (int64_t i = lane; i < bytes / 16; i += 32) parts[i] = make_uint4(0, 0, 0, 0);
    return;
  }
  auto* parts = reinterpret_cast<uint16_t*>(row);
  for (int64_t i = lane; i < bytes / 2; i += 32) parts[i] = 0;
}

// Each lane checks one of 32 tokens for a row; the warp clears the tokens that have none.
__global__ void __launch_bounds__(kClearThreads) clear_kernel(const ClearRowsArgs args) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t lane = threadIdx.x % 32;
  const int64_t first = (int64_t{blockIdx.x} * kClearWarps + threadIdx.x / 32) * 32;
  const int64_t live =
      args.live_tokens == nullptr ? args.num_tokens : min(args.num_tokens, *args.live_tokens);
  const bool missing = first + lane < live && args.slot_row[first + lane] < 0;
  for (uint32_t left = __ballot_sync(0xffffffffU, missing); left != 0; left &= left - 1) {
    const int64_t token = first + __ffs(static_cast<int>(left)) - 1;
    clear_row(static_cast<char*>(args.out) + token * args.out_stride_bytes, args.row_bytes, lane);
  }
}

}  // namespace

void clear_rows(const ClearRowsArgs& args, CUstream_st* stream) {
  if (args.num_tokens == 0 || args.row_bytes == 0) return;
  const int64_t blocks = (args.num_tokens + kClearThreads - 1) / kClearThreads;
  cuda::launch("dispatch.clear_rows", &clear_kernel,
               {.blocks = blocks, .threads = kClearThreads, .stream = stream}, args);
}

}  // namespace conclave::inline v0::dispatch
