#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/vector16.cuh"
#include "cuda/launch.h"
#include "dispatch/cuda/spread_rows.h"

#include "conclave/error.h"

#include <cstdint>
#include <string>
#include <type_traits>

namespace conclave::inline v0::dispatch {
namespace {

constexpr int kSpreadThreads = 128;
constexpr int kLaneColumns = 8;  // 16 bytes of a 16-bit row
// Loads in flight per lane, followed by as many stores per slot. A token's row is read once.
constexpr int kParts = 4;
constexpr int kPartColumns = 32 * kLaneColumns;
constexpr int64_t kUnitColumns = int64_t{kParts} * kPartColumns;

struct SpreadParams {
  SpreadRows args;
  int64_t units_per_row = 0;
  bool aligned = false;  // rows of tokens begin at multiples of 16 bytes
};

__device__ __forceinline__ int64_t live_rows(const SpreadRows& args) {
  if (args.live_rows == nullptr) return args.num_rows;
  const int64_t live = *args.live_rows;
  return live < 0 ? 0 : (live < args.num_rows ? live : args.num_rows);
}

// Loads the first `columns` of eight elements.
template <class From, class To>
__device__ __forceinline__ uint4 load_part(const From* from, int64_t columns, bool aligned) {
  union {
    To elements[kLaneColumns];
    uint4 bits;
  } result;
  if (columns < kLaneColumns || !aligned) {
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      const float value = c < columns ? cuda::device::widen(from[c]) : 0.0F;
      result.elements[c] = cuda::device::narrow<To>(value);
    }
  } else if constexpr (std::is_same_v<From, To>) {
    result.bits = cuda::device::load_once_16(from);
  } else {
    float values[kLaneColumns];
    cuda::device::load_8(from, values);
    cuda::device::store_8(values, result.elements);
  }
  return result.bits;
}

template <class To>
__device__ __forceinline__ void store_part(const uint4& bits, int64_t columns, To* to) {
  if (columns >= kLaneColumns) {
    *reinterpret_cast<uint4*>(to) = bits;
    return;
  }
  union {
    uint4 bits;
    To elements[kLaneColumns];
  } value{bits};
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    if (c < columns) to[c] = value.elements[c];
  }
}

// One warp per unit: kUnitColumns columns of a token.
template <class From, class To>
__global__ void __launch_bounds__(kSpreadThreads)
    spread_kernel(const __grid_constant__ SpreadParams params) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const SpreadRows& args = params.args;
  const int64_t unit = int64_t{blockIdx.x} * (kSpreadThreads / 32) + threadIdx.x / 32;
  const int64_t token = unit / params.units_per_row;
  if (token >= live_rows(args)) return;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int64_t column = (unit - token * params.units_per_row) * kUnitColumns + lane * kLaneColumns;
  const int64_t left = args.columns - column;
  const From* from = static_cast<const From*>(args.rows) + token * args.row_stride + column;
  To* const out = static_cast<To*>(args.out) + column;
  const int32_t* const slots = args.slot_row + token * args.top_k;
  int32_t rows = lane < args.top_k ? slots[lane] : -1;
  uint4 parts[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const int64_t columns = left - p * kPartColumns;
    if (columns > 0) {
      parts[p] = load_part<From, To>(from + p * kPartColumns, columns, params.aligned);
    }
  }
  for (int32_t first = 0; first < args.top_k; first += 32) {
    if (first > 0) rows = first + lane < args.top_k ? slots[first + lane] : -1;
    const int32_t count = min(32, args.top_k - first);
    for (int32_t slot = 0; slot < count; ++slot) {
      const int32_t row = __shfl_sync(0xffffffffU, rows, slot);
      if (row < 0) continue;
      To* const to = out + row * args.out_stride;
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const int64_t columns = left - p * kPartColumns;
        if (columns > 0) store_part(parts[p], columns, to + p * kPartColumns);
      }
    }
  }
}

template <class From, class To>
void launch_spread(const SpreadRows& args, CUstream_st* stream) {
  const bool aligned = reinterpret_cast<uintptr_t>(args.rows) % 16 == 0 &&
                       args.row_stride * static_cast<int64_t>(sizeof(From)) % 16 == 0;
  const SpreadParams params{
      .args = args, .units_per_row = ceil_div(args.columns, kUnitColumns), .aligned = aligned};
  cuda::launch(
      "dispatch.spread_rows", spread_kernel<From, To>,
      {.blocks = ceil_div(args.num_rows * params.units_per_row, int64_t{kSpreadThreads / 32}),
       .threads = kSpreadThreads,
       .stream = stream},
      params);
}

template <class From>
void spread_from(const SpreadRows& args, CUstream_st* stream) {
  if (args.out_dtype == DType::kF16) return launch_spread<From, __half>(args, stream);
  launch_spread<From, __nv_bfloat16>(args, stream);
}

void check_args(const SpreadRows& args) {
  const bool aligned = reinterpret_cast<uintptr_t>(args.out) % 16 == 0 &&
                       args.out_stride * byte_size(args.out_dtype) % 16 == 0;
  if (aligned) return;
  throw Error(ErrorCode::kMisaligned,
              {.what = "spread_rows writes rows 16 bytes at a time",
               .tensor = "out",
               .expected = "rows at multiples of 16 bytes",
               .found = "a stride of " + std::to_string(args.out_stride) + " elements"});
}

}  // namespace

void spread_rows(const SpreadRows& args, CUstream_st* stream) {
  if (args.num_rows == 0 || args.columns == 0) return;
  check_args(args);
  switch (args.dtype) {
    case DType::kF32:
      return spread_from<float>(args, stream);
    case DType::kF16:
      return spread_from<__half>(args, stream);
    default:
      return spread_from<__nv_bfloat16>(args, stream);
  }
}

}  // namespace conclave::inline v0::dispatch
