#include "comm/nccl/window_layout.h"
#include "comm/nccl/window_steps.h"
#include "core/checked.h"
#include "cuda/check.h"
#include "cuda/launch.h"
#include "dispatch/cuda/window_rows.cuh"
#include "dispatch/cuda/window_rows.h"

#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0::dispatch {
namespace {

using Kernel = void (*)(comm::WindowParams, device::WindowRowParams);

template <class From>
Kernel kernel_to(DType to) {
  switch (to) {
    case DType::kF32:
      return &device::window_row_kernel<From, float>;
    case DType::kF16:
      return &device::window_row_kernel<From, __half>;
    default:
      return &device::window_row_kernel<From, __nv_bfloat16>;
  }
}

Kernel kernel_for(DType from, DType to) {
  switch (from) {
    case DType::kF32:
      return kernel_to<float>(to);
    case DType::kF16:
      return kernel_to<__half>(to);
    default:
      return kernel_to<__nv_bfloat16>(to);
  }
}

device::WindowRowParams params_of(const WindowRows& rows) {
  const PackRankRows& pack = rows.pack;
  device::WindowRowParams params{.pack = pack,
                                 .aligned = reinterpret_cast<uintptr_t>(pack.rows) % 16 == 0 &&
                                            pack.row_stride * byte_size(pack.dtype) % 16 == 0,
                                 .is_there = pack.form.columns == 0,
                                 .blocks = const_cast<std::byte*>(rows.unpack.blocks),
                                 .topk_ids = rows.unpack.topk_ids,
                                 .topk_weights = rows.unpack.topk_weights,
                                 .marks = rows.unpack.marks,
                                 .pieces = ceil_div(pack.form.bytes, device::kPieceBytes),
                                 .first_row = {},
                                 .rows = {}};
  std::ranges::copy(rows.first_rows, params.first_row);
  std::ranges::copy(rows.num_rows, params.rows);
  return params;
}

}  // namespace

void WindowRowKernel::enqueue(const comm::WindowParams& windows, CUstream_st* stream) const {
  const device::WindowRowParams params = params_of(rows_);
  const int64_t most = *std::max_element(params.rows, params.rows + windows.ranks);
  cuda::launch("dispatch.window_rows", kernel_for(rows_.pack.dtype, rows_.pack.form.dtype),
               {.blocks = comm::blocks_of_units(most * params.pieces, windows.lane_bits),
                .threads = device::kRowThreads,
                .stream = stream},
               windows, params);
}

void prepare_window_rows() {
  cudaFuncAttributes ignored{};
  for (const DType from : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const DType to : {DType::kF32, DType::kF16, DType::kBF16}) {
      cuda::check(cudaFuncGetAttributes(&ignored, kernel_for(from, to)), "cudaFuncGetAttributes");
    }
  }
}

}  // namespace conclave::inline v0::dispatch
