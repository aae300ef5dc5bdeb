#include "comm/nccl/window_kernel.cuh"
#include "comm/nccl/window_steps.h"
#include "comm/nccl/window_stream.cuh"
#include "comm/nccl/window_takes.cuh"
#include "cuda/check.h"
#include "cuda/launch.h"

#include <algorithm>

namespace conclave::inline v0::comm {
namespace {

bool is_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kSumVectorBytes == 0;
}

bool is_short(const WindowParams& params) {
  for (int32_t rank = 0; rank < params.ranks; ++rank) {
    const WindowMessage& message = params.messages[rank];
    if (message.send_bytes > params.slot_bytes || message.recv_bytes > params.slot_bytes) {
      return false;
    }
  }
  return true;
}

// There is a block for each stripe of the longest message.
int64_t blocks_for(const WindowParams& params) {
  int64_t blocks = 1;
  for (int32_t rank = 0; rank < params.ranks; ++rank) {
    const WindowMessage& message = params.messages[rank];
    blocks = std::max<int64_t>({blocks, stripes_of(message.send_bytes, params.lane_bits),
                                stripes_of(message.recv_bytes, params.lane_bits)});
  }
  return blocks;
}

template <class Take>
void launch(const WindowParams& params, const Take& take, CUstream_st* stream) {
  const bool by_stripes = is_short(params);
  cuda::launch(by_stripes ? "comm.nccl.windows" : "comm.nccl.window_stream",
               by_stripes ? &window_kernel<Take> : &stream_kernel<Take>,
               {.blocks = by_stripes ? blocks_for(params) : int64_t{1} << params.lane_bits,
                .threads = by_stripes ? kWindowThreads : kStreamThreads,
                .overlap = cuda::Overlap::kNone,
                .stream = stream},
               params, take);
}

template <class T, class Rule>
void add(const WindowParams& params, const WindowSum& sum, CUstream_st* stream) {
  const window::AddArrived<T, Rule> take{.own = sum.own,
                                         .out = sum.out,
                                         .bytes = sum.bytes,
                                         .aligned = is_aligned(sum.own) && is_aligned(sum.out)};
  launch(params, take, stream);
}

template <class T>
void add_by(const WindowParams& params, const WindowSum& sum, CUstream_st* stream) {
  if (sum.op == ReduceOp::kSum) return add<T, Sum<T>>(params, sum, stream);
  add<T, Max<T>>(params, sum, stream);
}

template <class Take>
void prepare() {
  cudaFuncAttributes ignored{};
  cuda::check(cudaFuncGetAttributes(&ignored, &window_kernel<Take>), "cudaFuncGetAttributes");
  cuda::check(cudaFuncGetAttributes(&ignored, &stream_kernel<Take>), "cudaFuncGetAttributes");
}
template <class T>
void prepare_sums() {
  prepare<window::AddArrived<T, Sum<T>>>();
  prepare<window::AddArrived<T, Max<T>>>();
}

}  // namespace

void exchange_by_windows(const WindowParams& params, CUstream_st* stream) {
  launch(params, window::PlaceArrived{}, stream);
}

void add_by_windows(const WindowParams& params, const WindowSum& sum, CUstream_st* stream) {
  switch (sum.dtype) {
    case DType::kF64:
      return add_by<double>(params, sum, stream);
    case DType::kI32:
      return add_by<int32_t>(params, sum, stream);
    case DType::kI64:
      return add_by<int64_t>(params, sum, stream);
    default:
      return add_by<float>(params, sum, stream);
  }
}

void prepare_window_steps() {
  prepare<window::PlaceArrived>();
  prepare_sums<float>();
  prepare_sums<double>();
  prepare_sums<int32_t>();
  prepare_sums<int64_t>();
}

}  // namespace conclave::inline v0::comm
