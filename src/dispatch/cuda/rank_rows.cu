#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/vector16.cuh"
#include "cuda/launch.h"
#include "dispatch/cuda/rank_rows.h"

#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0::dispatch {
namespace {

constexpr int kThreads = 256;
constexpr int kPart = 8;  // columns that a thread moves at a time
constexpr int64_t kMostBlocks = 4096;

struct PackParams {
  PackRankRows args;
  bool aligned = false;  // rows begin at multiples of 16 bytes
};

// One block of threads for each row, and again for those beyond the grid.
template <class From, class To>
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackParams params) {
  // An earlier kernel may still be writing rows and choices.
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const PackRankRows& args = params.args;
  const RankRowForm& form = args.form;
  const int64_t live = args.live_rows == nullptr ? args.num_rows : *args.live_rows;
  for (int64_t row = blockIdx.x; row < args.num_rows; row += gridDim.x) {
    std::byte* const block = args.out + row * form.bytes;
    const From* const from = static_cast<const From*>(args.rows) + row * args.row_stride;
    To* const to = reinterpret_cast<To*>(block);
    for (int64_t column = int64_t{threadIdx.x} * kPart; column < form.columns;
         column += int64_t{kThreads} * kPart) {
      float x[kPart];
      if (params.aligned && column + kPart <= form.columns) {
        cuda::device::load_8(from + column, x);
        cuda::device::store_8(x, to + column);
        continue;
      }
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        if (column + i < form.columns) {
          to[column + i] = cuda::device::narrow<To>(cuda::device::widen(from[column + i]));
        }
      }
    }
    auto* const ids = reinterpret_cast<int32_t*>(block + form.ids);
    auto* const weights = reinterpret_cast<float*>(ids + form.top_k);
    for (int32_t slot = static_cast<int32_t>(threadIdx.x); slot < form.top_k; slot += kThreads) {
      const int64_t at = row * form.top_k + slot;
      ids[slot] = row < live ? args.topk_ids[at] : -1;
      weights[slot] = row < live ? args.topk_weights[at] : 0.0F;
    }
    if (form.mark != 0 && threadIdx.x == 0) {
      const int32_t mark = args.marks == nullptr ? args.mark : args.marks[row];
      *reinterpret_cast<int32_t*>(block + form.mark) = row < live ? mark : 0;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const __grid_constant__ UnpackChoices args, int64_t choices) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= choices) return;
  const RankRowForm& form = args.form;
  const int64_t row = at / form.top_k;
  const int64_t slot = at - row * form.top_k;
  const std::byte* const block = args.blocks + row * form.bytes;
  const auto* const ids = reinterpret_cast<const int32_t*>(block + form.ids);
  args.topk_ids[at] = ids[slot];
  args.topk_weights[at] = reinterpret_cast<const float*>(ids + form.top_k)[slot];
  if (slot == 0 && form.mark != 0) {
    args.marks[row] = *reinterpret_cast<const int32_t*>(block + form.mark);
  }
}

template <class Part>
__device__ __forceinline__ const Part* part_of(const RankParts& args, int32_t rank, int64_t at) {
  if (rank == args.rank) return static_cast<const Part*>(args.own) + at;
  const int64_t place = rank < args.rank ? rank : rank - 1;
  return static_cast<const Part*>(args.others) + place * args.num_rows * args.stride + at;
}

// Rows of parts have whole units, whose padding is added, too, and not stored.
template <class Part>
__global__ void __launch_bounds__(kThreads)
    add_kernel(const __grid_constant__ RankParts args, int64_t units_per_row, bool aligned) {
  constexpr int kUnit = 16 / static_cast<int>(sizeof(Part));
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t units = args.num_rows * units_per_row;
  for (int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x; unit < units;
       unit += int64_t{gridDim.x} * kThreads) {
    const int64_t row = unit / units_per_row;
    const int64_t column = (unit - row * units_per_row) * kUnit;
    const int64_t at = row * args.stride + column;
    float sum[kUnit];
    for (int32_t rank = 0; rank < args.ranks; ++rank) {
      union {
        uint4 bits;
        Part values[kUnit];
      } next;
      next.bits = cuda::device::load_once_16(part_of<Part>(args, rank, at));
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        const float value = cuda::device::widen(next.values[i]);
        sum[i] = rank == 0 ? value : __fadd_rn(sum[i], value);
      }
    }
    float* const out = args.out + row * args.out_stride + column;
    if (aligned && column + kUnit <= args.columns) {
#pragma unroll
      for (int i = 0; i < kUnit; i += 4) {
        *reinterpret_cast<float4*>(out + i) =
            make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (column + i < args.columns) out[i] = sum[i];
    }
  }
}

auto add_kernel_for(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return &add_kernel<float>;
    case DType::kF16:
      return &add_kernel<__half>;
    default:
      return &add_kernel<__nv_bfloat16>;
  }
}

template <class From>
auto pack_kernel_to(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return &pack_kernel<From, float>;
    case DType::kF16:
      return &pack_kernel<From, __half>;
    default:
      return &pack_kernel<From, __nv_bfloat16>;
  }
}

auto pack_kernel_for(DType from, DType to) {
  switch (from) {
    case DType::kF32:
      return pack_kernel_to<float>(to);
    case DType::kF16:
      return pack_kernel_to<__half>(to);
    default:
      return pack_kernel_to<__nv_bfloat16>(to);
  }
}

}  // namespace

void pack_rank_rows(const PackRankRows& args, CUstream_st* stream) {
  if (args.num_rows == 0) return;
  const PackParams params{.args = args,
                          .aligned = reinterpret_cast<uintptr_t>(args.rows) % 16 == 0 &&
                                     args.row_stride * byte_size(args.dtype) % 16 == 0};
  cuda::launch(
      "dispatch.pack_rank_rows", pack_kernel_for(args.dtype, args.form.dtype),
      {.blocks = std::min(args.num_rows, kMostBlocks), .threads = kThreads, .stream = stream},
      params);
}

void unpack_choices(const UnpackChoices& args, CUstream_st* stream) {
  const int64_t choices = args.num_rows * args.form.top_k;
  if (choices == 0) return;
  cuda::launch("dispatch.unpack_choices", &unpack_kernel,
               {.blocks = ceil_div(choices, int64_t{kThreads}),
                .threads = kThreads,
                .overlap = cuda::Overlap::kNone,
                .stream = stream},
               args, choices);
}

void add_rank_parts(const RankParts& args, CUstream_st* stream) {
  const int64_t units_per_row = ceil_div(args.columns, 16 / byte_size(args.dtype));
  const int64_t units = args.num_rows * units_per_row;
  if (units == 0) return;
  cuda::launch("dispatch.add_rank_parts", add_kernel_for(args.dtype),
               {.blocks = std::min(ceil_div(units, int64_t{kThreads}), kMostBlocks),
                .threads = kThreads,
                .overlap = cuda::Overlap::kNone,
                .stream = stream},
               args, units_per_row, args.out_stride % 4 == 0);
}

}  // namespace conclave::inline v0::dispatch
