#include "comm/nccl/device_steps.h"
#include "comm/nccl/ordered_sums.cuh"
#include "core/checked.h"
#include "cuda/check.h"
#include "cuda/launch.h"

#include <algorithm>

namespace conclave::inline v0::comm {
namespace {

constexpr int kThreads = 256;

struct Claims {
  int32_t count;
  DeviceClaim list[kMaxClaims];
};

Claims kernel_claims(const DeviceClaims& claims) {
  Claims copy{};
  copy.count = claims.count;
  std::copy_n(claims.list.begin(), claims.count, copy.list);
  return copy;
}

// The pointers of the marks, since a kernel cannot call the functions of std::array.
struct Place {
  uint32_t* count;      // on the device
  uint32_t* mark;       // in host memory
  uint32_t* all;        // further counter, or null
  uint32_t* all_mark;
  DeviceClaim* mine;    // in host memory
  DeviceClaim* theirs;
};

__device__ __forceinline__ void count_up(uint32_t* count, uint32_t* mark) {
  *static_cast<volatile uint32_t*>(mark) = atomicAdd(count, 1U) + 1;
}

__global__ void __launch_bounds__(kMaxClaims)
    begun_kernel(const __grid_constant__ Claims claims, const Place place, DeviceClaim* out) {
  const auto at = static_cast<int32_t>(threadIdx.x);
  if (at < claims.count) out[at] = claims.list[at];
  if (at != 0) return;
  count_up(place.count, place.mark);
  if (place.all != nullptr) count_up(place.all, place.all_mark);
}

__global__ void __launch_bounds__(kMaxClaims)
    ended_kernel(const __grid_constant__ Claims claims, const Place place, const DeviceClaim* in) {
  const auto at = static_cast<int32_t>(threadIdx.x);
  if (at < claims.count) {
    const DeviceClaim mine = claims.list[at];
    DeviceClaim theirs = in[at];
    theirs.peer = mine.peer;
    const bool agree = mine.code == theirs.code && mine.expected == theirs.offered &&
                       mine.offered == theirs.expected;
    if (!agree && atomicAdd(place.all, 1U) == 0) {
      *place.mine = mine;
      *place.theirs = theirs;
      __threadfence_system();
      *static_cast<volatile uint32_t*>(place.all_mark) = 1;
    }
  }
  __threadfence_system();
  __syncthreads();
  if (at == 0) count_up(place.count, place.mark);
}

template <class T>
struct Addends {
  const T* own;
  const T* others;
  int64_t stride;
  int32_t rank;
  int32_t ranks;

  __device__ __forceinline__ const T* of(int32_t q) const {
    if (q == rank) return own;
    return others + (q < rank ? q : q - 1) * stride;
  }
};

template <class T, class Rule>
__global__ void __launch_bounds__(kThreads)
    add_kernel(const Addends<T> parts, T* out, int64_t count, bool aligned) {
  add_parts<T, Rule>([&](int32_t q) { return parts.of(q); }, parts.ranks, out, count, aligned,
                     int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads);
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kSumVectorBytes == 0; }

template <class T, class Rule>
void add(const OrderedParts& parts, std::byte* out, int64_t bytes, CUstream_st* stream) {
  constexpr int64_t kMaxBlocks = 1024;
  const auto count = bytes / static_cast<int64_t>(sizeof(T));
  const bool aligned = is_aligned(parts.own) && is_aligned(parts.others) && is_aligned(out) &&
                       parts.stride_bytes % kSumVectorBytes == 0;
  const Addends<T> addends{reinterpret_cast<const T*>(parts.own),
                           reinterpret_cast<const T*>(parts.others),
                           parts.stride_bytes / static_cast<int64_t>(sizeof(T)), parts.rank,
                           parts.ranks};
  const int64_t items = aligned ? ceil_div(bytes, int64_t{kSumVectorBytes}) : count;
  cuda::launch("comm.nccl.add_in_order", &add_kernel<T, Rule>,
               {.blocks = std::clamp<int64_t>(ceil_div(items, int64_t{kThreads}), 1, kMaxBlocks),
                .threads = kThreads,
                .overlap = cuda::Overlap::kNone,
                .stream = stream},
               addends, reinterpret_cast<T*>(out), count, aligned);
}

template <class T>
void add_by(ReduceOp op, const OrderedParts& parts, std::byte* out, int64_t bytes,
            CUstream_st* stream) {
  if (op == ReduceOp::kSum) return add<T, Sum<T>>(parts, out, bytes, stream);
  add<T, Max<T>>(parts, out, bytes, stream);
}

cuda::LaunchShape one_block(CUstream_st* stream) {
  return {.blocks = 1,
          .threads = kMaxClaims,
          .overlap = cuda::Overlap::kNone,
          .stream = stream};
}

template <class T>
void prepare_sums() {
  cudaFuncAttributes ignored{};
  cuda::check(cudaFuncGetAttributes(&ignored, &add_kernel<T, Sum<T>>), "cudaFuncGetAttributes");
  cuda::check(cudaFuncGetAttributes(&ignored, &add_kernel<T, Max<T>>), "cudaFuncGetAttributes");
}

}  // namespace

void mark_begun(const MarkPlace& place, bool is_collective, const DeviceClaims& claims,
                DeviceClaim* out, CUstream_st* stream) {
  const auto cell = static_cast<size_t>(place.cell);
  const Place at{.count = place.counters->begun.data() + cell,
                 .mark = place.marks->begun.data() + cell,
                 .all = is_collective ? &place.counters->collectives : nullptr,
                 .all_mark = &place.marks->collectives,
                 .mine = nullptr,
                 .theirs = nullptr};
  cuda::launch("comm.nccl.mark_begun", &begun_kernel, one_block(stream), kernel_claims(claims), at,
               out);
}

void mark_ended(const MarkPlace& place, const DeviceClaims& expected, const DeviceClaim* in,
                CUstream_st* stream) {
  const auto cell = static_cast<size_t>(place.cell);
  const Place at{.count = place.counters->ended.data() + cell,
                 .mark = place.marks->ended.data() + cell,
                 .all = &place.counters->mismatches,
                 .all_mark = &place.marks->mismatches,
                 .mine = &place.marks->mine,
                 .theirs = &place.marks->theirs};
  cuda::launch("comm.nccl.mark_ended", &ended_kernel, one_block(stream), kernel_claims(expected),
               at, in);
}

void add_in_order(const OrderedParts& parts, std::byte* out, int64_t bytes, DType dtype,
                  ReduceOp op, CUstream_st* stream) {
  if (bytes == 0) return;
  switch (dtype) {
    case DType::kF64:
      return add_by<double>(op, parts, out, bytes, stream);
    case DType::kI32:
      return add_by<int32_t>(op, parts, out, bytes, stream);
    case DType::kI64:
      return add_by<int64_t>(op, parts, out, bytes, stream);
    default:
      return add_by<float>(op, parts, out, bytes, stream);
  }
}

void prepare_steps() {
  cudaFuncAttributes ignored{};
  cuda::check(cudaFuncGetAttributes(&ignored, &begun_kernel), "cudaFuncGetAttributes");
  cuda::check(cudaFuncGetAttributes(&ignored, &ended_kernel), "cudaFuncGetAttributes");
  prepare_sums<float>();
  prepare_sums<double>();
  prepare_sums<int32_t>();
  prepare_sums<int64_t>();
}

}  // namespace conclave::inline v0::comm
