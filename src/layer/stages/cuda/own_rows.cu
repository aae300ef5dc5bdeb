#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/vector16.cuh"
#include "cuda/launch.h"
#include "layer/stages/cuda/own_rows.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0 {
namespace {

constexpr int kOwnThreads = 256;
constexpr int kOwnPart = 8;  // columns that a thread makes at a time
// Columns of a block: few enough that one token's rows are made by many multiprocessors.
constexpr int64_t kBlockColumns = int64_t{kOwnThreads} * kOwnPart;

// The expert of a sorted row: threads look at one expert each. Experts without rows hold none.
__device__ __forceinline__ int32_t expert_of(const OwnRows& args, int32_t row) {
  __shared__ int32_t found;
  const auto experts = static_cast<int32_t>(args.num_experts);
  for (int32_t expert = static_cast<int32_t>(threadIdx.x); expert < experts;
       expert += kOwnThreads) {
    if (args.expert_begin[expert] <= row && row < args.expert_begin[expert + 1]) found = expert;
  }
  __syncthreads();
  return found;
}

// The columns of a row at eight places from `column` on. Beyond the table there are none.
__device__ __forceinline__ void load_columns(const OwnRows& args, int64_t expert, int64_t column,
                                             int32_t (&columns)[kOwnPart]) {
  if (args.columns == nullptr || column >= args.table_stride) {
#pragma unroll
    for (int i = 0; i < kOwnPart; ++i) {
      const bool is_there = args.columns == nullptr && column + i < args.num_columns;
      columns[i] = is_there ? static_cast<int32_t>(column) + i : -1;
    }
    return;
  }
  const auto* const table =
      reinterpret_cast<const int4*>(args.columns + expert * args.table_stride + column);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int4 four = table[half];
    columns[4 * half] = four.x;
    columns[4 * half + 1] = four.y;
    columns[4 * half + 2] = four.z;
    columns[4 * half + 3] = four.w;
  }
}

// Eight values of a slot's row, as its expert reads it.
template <class From>
__device__ __forceinline__ void make_values(const OwnRows& args, int64_t slot, int64_t expert,
                                            int64_t column, float (&values)[kOwnPart]) {
  int32_t columns[kOwnPart];
  load_columns(args, expert, column, columns);
  float factors[kOwnPart];
  const bool has_factors = args.factors != nullptr && column < args.table_stride;
  if (has_factors) {
    cuda::device::load_8(args.factors + expert * args.table_stride + column, factors);
  }
  const auto* const row =
      static_cast<const From*>(args.rows) + slot / args.slots_per_row * args.row_stride;
#pragma unroll
  for (int i = 0; i < kOwnPart; ++i) {
    values[i] = 0.0F;
    if (columns[i] < 0) continue;
    values[i] = cuda::device::widen(row[columns[i]]);
    if (args.weights != nullptr) values[i] = __fmul_rn(values[i], args.weights[slot]);
    if (has_factors) values[i] = __fmul_rn(values[i], factors[i]);
  }
}

// Stores the values, or their two terms. Infinity and NaN leave nothing.
template <class To>
__device__ __forceinline__ void store_values(const OwnRowForm& form,
                                             const float (&values)[kOwnPart], int64_t column,
                                             To* row) {
  if (form.term_columns == 0) {
    cuda::device::store_8(values, row + column);
    return;
  }
  float rest[kOwnPart];
#pragma unroll
  for (int i = 0; i < kOwnPart; ++i) {
    const float first = cuda::device::widen(cuda::device::narrow<To>(values[i]));
    rest[i] = isfinite(first) ? values[i] - first : 0.0F;
  }
  To* const first = row + column + column / form.term_columns * form.term_columns;
  cuda::device::store_8(values, first);
  cuda::device::store_8(rest, first + form.term_columns);
}

int64_t columns_of(const OwnRowForm& form) {
  return form.term_columns == 0 ? form.width : form.width / 2;
}

// One block for up to kBlockColumns columns of a slot's row.
template <class From, class To>
__global__ void __launch_bounds__(kOwnThreads)
    own_rows_kernel(const __grid_constant__ OwnRows args, int64_t columns, int64_t blocks_of_row) {
  // Earlier kernels group the slots, and may still be writing the rows.
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t slot = int64_t{blockIdx.x} / blocks_of_row;
  const int64_t column =
      int64_t{blockIdx.x} % blocks_of_row * kBlockColumns + int64_t{threadIdx.x} * kOwnPart;
  const int32_t sorted = args.slot_row[slot];
  if (sorted < 0 && !args.clears_others) return;
  const int32_t expert = sorted < 0 ? 0 : expert_of(args, sorted);
  if (column >= columns) return;
  float values[kOwnPart] = {};
  if (sorted >= 0) make_values<From>(args, slot, expert, column, values);
  store_values(args.form, values, column, static_cast<To*>(args.out) + slot * args.form.width);
}

template <class From, class To>
void enqueue(const OwnRows& args, CUstream_st* stream) {
  const int64_t columns = columns_of(args.form);
  const int64_t blocks_of_row = ceil_div(columns, kBlockColumns);
  cuda::launch("layer.own_rows", own_rows_kernel<From, To>,
               {.blocks = args.num_slots * blocks_of_row, .threads = kOwnThreads, .stream = stream},
               args, columns, blocks_of_row);
}

template <class From>
void enqueue_from(const OwnRows& args, CUstream_st* stream) {
  args.form.dtype == DType::kF32 ? enqueue<From, float>(args, stream)
                                 : enqueue<From, __nv_bfloat16>(args, stream);
}

}  // namespace

void make_own_rows(const OwnRows& args, CUstream_st* stream) {
  if (args.num_slots == 0 || args.form.width == 0) return;
  switch (args.dtype) {
    case DType::kF32:
      return enqueue_from<float>(args, stream);
    case DType::kF16:
      return enqueue_from<__half>(args, stream);
    default:
      return enqueue_from<__nv_bfloat16>(args, stream);
  }
}

}  // namespace conclave::inline v0
