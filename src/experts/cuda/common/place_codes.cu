#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/vector16.cuh"
#include "cuda/launch.h"
#include "experts/cuda/common/place_codes.h"
#include "experts/cuda/common/vocabulary.h"
#include "quant/code_number.cuh"

#include <cstdint>
#include <cuda_bf16.h>

namespace conclave::inline v0::experts {
namespace {

constexpr int kThreads = 128;
constexpr int kPart = 16;  // codes of a lane at a time
// Loads in flight per lane, followed by as many stores per slot.
constexpr int kParts = 2;
constexpr int kPartColumns = 32 * kPart;
constexpr int64_t kUnitColumns = int64_t{kParts} * kPartColumns;

// One warp per unit: kUnitColumns columns of a row.
struct Unit {
  int64_t row;
  int64_t column;  // where the lane's first part begins
};
__device__ __forceinline__ Unit unit_of_warp(int64_t units_per_row) {
  const int64_t unit = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  const int64_t row = unit / units_per_row;
  return {row, (unit - row * units_per_row) * kUnitColumns + threadIdx.x % 32 * kPart};
}

// The first `count` of 16 codes; bytes behind the last column of a row may be anybody's.
__device__ __forceinline__ uint4 load_codes(const uint8_t* from, int64_t count) {
  if (count >= kPart) return ptx::load_once_16(from);
  union {
    uint8_t codes[kPart];
    uint4 bits;
  } result{};
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    if (i < count) result.codes[i] = from[i];
  }
  return result.bits;
}

__device__ __forceinline__ void store_codes(const uint4& bits, int64_t count, uint8_t* to) {
  if (count >= kPart) {
    *reinterpret_cast<uint4*>(to) = bits;
    return;
  }
  union {
    uint4 bits;
    uint8_t codes[kPart];
  } value{bits};
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    if (i < count) to[i] = value.codes[i];
  }
}

// A part that begins a group brings its scale along.
__device__ __forceinline__ bool begins_group(const CodedRows& rows, int64_t column) {
  return column < rows.columns && column % rows.columns_of_group == 0;
}

__global__ void __launch_bounds__(kThreads)
    place_kernel(const __grid_constant__ PlaceCodes args, int64_t units_per_row) {
  // Kernels behind this one read the grouping as soon as they may begin.
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const CodedRows& rows = args.rows;
  const Unit unit = unit_of_warp(units_per_row);
  if (unit.row >= rows.num_rows) return;
  const uint8_t* const from = rows.codes + unit.row * rows.code_stride;
  uint4 parts[kParts];
  float scales[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const int64_t column = unit.column + p * kPartColumns;
    if (column < rows.columns) parts[p] = load_codes(from + column, rows.columns - column);
    if (begins_group(rows, column)) {
      scales[p] = rows.scales[unit.row * rows.scale_stride + column / rows.columns_of_group];
    }
  }
  const auto place = [&](int64_t target) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const int64_t column = unit.column + p * kPartColumns;
      if (column >= rows.columns) continue;
      store_codes(parts[p], rows.columns - column, args.codes + target * args.code_stride + column);
      if (begins_group(rows, column)) {
        args.scales[target * args.scale_stride +
                    column / rows.columns_of_group * args.group_stride] = scales[p];
      }
    }
  };
  if (args.slot_row == nullptr) return place(unit.row);
  const int32_t* const slots = args.slot_row + unit.row * args.top_k;
  for (int32_t slot = 0; slot < args.top_k; ++slot) {
    const int32_t target = slots[slot];
    if (target >= 0) place(target);
  }
}

template <class Number>
__global__ void __launch_bounds__(kThreads)
    value_kernel(const __grid_constant__ CodeRowValues args, int64_t units_per_row) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const CodedRows& rows = args.rows;
  const Unit unit = unit_of_warp(units_per_row);
  if (unit.row >= rows.num_rows) return;
  const uint8_t* const from = rows.codes + unit.row * rows.code_stride;
  auto* const to = static_cast<__nv_bfloat16*>(args.values) + unit.row * args.value_stride;
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const int64_t column = unit.column + p * kPartColumns;
    const int64_t count = rows.columns - column;
    if (count <= 0) continue;
    union {
      uint4 bits;
      uint8_t codes[kPart];
    } part{load_codes(from + column, count)};
    const float scale = rows.scales[unit.row * rows.scale_stride + column / rows.columns_of_group];
    const float in_values = args.factors == nullptr ? scale : 1.0F;
    if (args.factors != nullptr && column == 0) args.factors[unit.row] = scale;
    float values[2][8];
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      values[i / 8][i % 8] = Number::of(part.codes[i]) * in_values;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      __nv_bfloat16* const eight = to + column + half * 8;
      if (count >= half * 8 + 8) {
        ptx::store_8(values[half], eight);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (half * 8 + i < count) eight[i] = ptx::narrow<__nv_bfloat16>(values[half][i]);
      }
    }
  }
}

cuda::LaunchShape shape_for(const CodedRows& rows, int64_t units_per_row, CUstream_st* stream) {
  return {.blocks = ceil_div(rows.num_rows * units_per_row, int64_t{kThreads / 32}),
          .threads = kThreads,
          .stream = stream};
}

}  // namespace

void place_codes(const PlaceCodes& args, CUstream_st* stream) {
  if (args.rows.num_rows == 0 || args.rows.columns == 0) return;
  const int64_t units_per_row = ceil_div(args.rows.columns, kUnitColumns);
  cuda::launch("experts.place_codes", &place_kernel, shape_for(args.rows, units_per_row, stream),
               args, units_per_row);
}

void code_row_values(const CodeRowValues& args, CUstream_st* stream) {
  if (args.rows.num_rows == 0 || args.rows.columns == 0) return;
  const int64_t units_per_row = ceil_div(args.rows.columns, kUnitColumns);
  quant::with_code_number(args.rows.dtype, [&](auto number) {
    cuda::launch("experts.code_row_values", &value_kernel<decltype(number)>,
                 shape_for(args.rows, units_per_row, stream), args, units_per_row);
  });
}

}  // namespace conclave::inline v0::experts
