#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "layer/stages/cuda/adapter_marks.h"

#include <algorithm>

namespace conclave::inline v0 {
namespace {

namespace ptx = cuda::device;

constexpr int kMarkThreads = 256;

__device__ int64_t id_at(const MarkTokens& args, int64_t token) {
  return args.ids_dtype == DType::kI64 ? static_cast<const int64_t*>(args.ids)[token]
                                       : static_cast<const int32_t*>(args.ids)[token];
}

// The mark of an id, 0 if it is not known.
__device__ int32_t mark_of(const MarkTokens& args, int64_t id) {
  int32_t low = 0;
  int32_t high = args.num_known;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (args.known[middle] < id) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < args.num_known && args.known[low] == id ? low + 1 : 0;
}

__global__ void __launch_bounds__(kMarkThreads) mark_kernel(const MarkTokens args) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const int64_t token = int64_t{blockIdx.x} * kMarkThreads + threadIdx.x;
  if (token >= args.num_tokens) return;
  const bool is_live = (args.live_tokens == nullptr || token < *args.live_tokens) &&
                       (args.padding_mask == nullptr || args.padding_mask[token]);
  const int64_t id = is_live ? id_at(args, token) : -1;
  const int32_t mark = id == -1 ? 0 : mark_of(args, id);
  args.marks[token] = mark;
  if (id != -1 && mark == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(args.unknown), 1ULL);
  }
}

__global__ void __launch_bounds__(kMarkThreads) split_kernel(const SplitChoices args) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const int64_t at = int64_t{blockIdx.x} * kMarkThreads + threadIdx.x;
  if (at >= args.num_tokens * args.slots) return;
  const bool has_mark = args.marks[at / args.slots] != 0;
  const int32_t id = args.ids[at];
  args.marked[at] = has_mark ? id : -1;
  if (args.others != nullptr) args.others[at] = has_mark ? -1 : id;
}

// One block per row, by pairs of bytes: every type of rows has them.
__global__ void __launch_bounds__(kMarkThreads) copy_kernel(const CopyMarked args) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const int64_t token = blockIdx.x;
  if (args.marks[token] == 0) return;
  if (args.live_tokens != nullptr && token >= *args.live_tokens) return;
  const auto* const from = reinterpret_cast<const uint16_t*>(
      static_cast<const std::byte*>(args.from) + token * args.from_stride_bytes);
  auto* const to =
      reinterpret_cast<uint16_t*>(static_cast<std::byte*>(args.to) + token * args.to_stride_bytes);
  for (size_t i = threadIdx.x; i < args.row_bytes / 2; i += kMarkThreads) to[i] = from[i];
}

}  // namespace

void mark_tokens(const MarkTokens& args, CUstream_st* stream) {
  if (args.num_tokens == 0) return;
  cuda::launch("layer.mark_tokens", &mark_kernel,
               {.blocks = ceil_div(args.num_tokens, int64_t{kMarkThreads}),
                .threads = kMarkThreads,
                .stream = stream},
               args);
}

void split_choices(const SplitChoices& args, CUstream_st* stream) {
  const int64_t choices = args.num_tokens * args.slots;
  if (choices == 0) return;
  cuda::launch("layer.split_choices", &split_kernel,
               {.blocks = ceil_div(choices, int64_t{kMarkThreads}),
                .threads = kMarkThreads,
                .stream = stream},
               args);
}

void copy_marked_rows(const CopyMarked& args, CUstream_st* stream) {
  if (args.num_tokens == 0) return;
  cuda::launch("layer.copy_marked_rows", &copy_kernel,
               {.blocks = args.num_tokens, .threads = kMarkThreads, .stream = stream}, args);
}

}  // namespace conclave::inline v0
