#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/vector16.cuh"
#include "cuda/launch.h"
#include "experts/cuda/common/exact_quotient.cuh"
#include "experts/cuda/common/round_rows.h"
#include "experts/cuda/common/vocabulary.h"
#include "quant/code_quotient.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0::experts {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kPart = 8;  // columns that a thread has at a time

// Neighbouring lanes that share a scale, and the columns that do.
struct Groups {
  int64_t columns = 0;
  int64_t of_row = 1;
  int32_t lanes = 1;         // share a scale: a power of two, at most a block
  bool has_vectors = false;  // parts begin at multiples of 16 bytes, in rows and in values
};

// Eight columns of a row, or fewer at the end of its group; zeros beyond.
template <class T>
__device__ __forceinline__ void load_part(const T* source, int64_t count, bool has_vectors,
                                          float (&x)[kPart]) {
  if (has_vectors && count >= kPart) {
    ptx::load_8(source, x);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPart; ++i) x[i] = i < count ? ptx::widen(source[i]) : 0.0F;
}

template <class Out>
__device__ __forceinline__ void store_part(Out* target, int64_t count, bool has_vectors,
                                           const float (&x)[kPart]) {
  if (has_vectors && count >= kPart) {
    ptx::store_8(x, target);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    if (i < count) target[i] = ptx::narrow<Out>(x[i]);
  }
}

// NaN does not count: its own value is NaN, which is enough.
__device__ __forceinline__ float largest(const float (&x)[kPart]) {
  float amax = 0;
#pragma unroll
  for (int i = 0; i < kPart; ++i) amax = fmaxf(amax, fabsf(x[i]));
  return amax;
}

// The largest of all threads of a group. All threads of a block call this together.
__device__ __forceinline__ float largest_of_group(float amax, int32_t lanes) {
  for (int distance = min(lanes, kWarp) / 2; distance > 0; distance /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffU, amax, distance));
  }
  if (lanes <= kWarp) return amax;
  __shared__ float of_warp[kThreads / kWarp];
  const auto warp = static_cast<int32_t>(threadIdx.x) / kWarp;
  if (threadIdx.x % kWarp == 0) of_warp[warp] = amax;
  __syncthreads();
  const int32_t warps = lanes / kWarp;
  const int32_t first = warp / warps * warps;
  for (int32_t i = 0; i < warps; ++i) amax = fmaxf(amax, of_warp[first + i]);
  return amax;
}

// The step that divides values, as a product: what goes into the values, and what belongs to the
// whole row.
struct Step {
  float divisor;
  float in_values;
  float of_row;
};
__device__ __forceinline__ Step step_of_group(const RoundRowsCuda& args, float amax) {
  const RowRounding& rule = args.rule;
  if (rule.form == ActivationScale::kTensorStatic) {
    const float step = *args.stated_step;
    return {step, 1.0F, step};
  }
  if (rule.scale == RowScaleRule::kTwoLevel) {
    const float whole = *args.stated_step;
    const float ratio = quant::two_level_ratio(amax, rule.largest_code, whole);
    return {quant::two_level_step(amax, rule.largest_code, whole), ratio, whole};
  }
  const float step = rule.scale == RowScaleRule::kQuotient
                         ? quant::step_of(amax, rule.largest_code, rule.power_of_two)
                         : quant::power_step(amax, rule.largest_code, rule.rounding);
  if (rule.form == ActivationScale::kToken) return {step, 1.0F, step};
  return {step, step, 1.0F};
}

// The rounded value of `value`, whose quotient by the step is given.
template <class Out>
__device__ __forceinline__ float rounded(const quant::RowGrid& grid, float value, float quotient,
                                         const Step& step) {
  if (!isfinite(value)) return NAN;
  const float in_values =
      sizeof(Out) == sizeof(float) ? step.in_values * step.of_row : step.in_values;
  return grid.nearest(quotient) * in_values;
}

template <class Out>
__device__ __forceinline__ void round_part(const quant::RowGrid& grid, const Step& step,
                                           float (&x)[kPart]) {
  if (has_inverse(step.divisor)) {
    const Inverse inverse = inverse_of(step.divisor);
#pragma unroll
    for (float& value : x) value = rounded<Out>(grid, value, times(value, inverse), step);
  } else {
#pragma unroll
    for (float& value : x) value = rounded<Out>(grid, value, __fdiv_rn(value, step.divisor), step);
  }
}

template <class T, class Out>
__global__ void __launch_bounds__(kThreads)
    round_groups(const RoundRowsCuda args, const Groups groups) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const int64_t rows =
      args.live_rows == nullptr ? args.num_rows : min(args.num_rows, int64_t{*args.live_rows});
  const int32_t in_block = kThreads / groups.lanes;
  const int64_t index = int64_t{blockIdx.x} * in_block + threadIdx.x / groups.lanes;
  const int64_t row = index / groups.of_row;
  // All threads of a warp take part in the search for the largest value.
  const bool lives = row < rows;
  const int64_t begin = index % groups.of_row * groups.columns;
  const int64_t end = lives ? min(args.columns, begin + groups.columns) : begin;
  const T* const source = static_cast<const T*>(args.rows) + (lives ? row * args.row_stride : 0);
  const int64_t first = begin + threadIdx.x % groups.lanes * kPart;
  const int64_t stride = int64_t{groups.lanes} * kPart;
  float x[kPart];
  load_part(source + first, end - first, groups.has_vectors, x);
  float amax = largest(x);
  for (int64_t column = first + stride; column < end; column += stride) {
    float more[kPart];
    load_part(source + column, end - column, groups.has_vectors, more);
    amax = fmaxf(amax, largest(more));
  }
  const Step step = step_of_group(args, largest_of_group(amax, groups.lanes));
  if (!lives) return;
  if (args.factors != nullptr && first == 0) args.factors[row] = step.of_row;
  Out* const target = static_cast<Out*>(args.values) + row * args.value_stride;
  for (int64_t column = first; column < end; column += stride) {
    if (column != first) load_part(source + column, end - column, groups.has_vectors, x);
    round_part<Out>(args.rule.grid, step, x);
    store_part(target + column, end - column, groups.has_vectors, x);
  }
}

bool is_aligned(const void* data, int64_t stride_bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
}

template <class T, class Out>
Groups groups_of(const RoundRowsCuda& args) {
  Groups groups;
  switch (args.rule.form) {
    case ActivationScale::kGroup:
      groups.columns = std::min(args.rule.group, args.columns);
      break;
    case ActivationScale::kTensorStatic:
      groups.columns = kPart;
      break;
    default:
      groups.columns = args.columns;
  }
  groups.of_row = ceil_div(args.columns, groups.columns);
  const auto parts = static_cast<uint64_t>(ceil_div(groups.columns, int64_t{kPart}));
  groups.lanes = static_cast<int32_t>(std::min(std::bit_ceil(parts), uint64_t{kThreads}));
  groups.has_vectors =
      (groups.of_row == 1 || groups.columns % kPart == 0) &&
      is_aligned(args.rows, args.row_stride * static_cast<int64_t>(sizeof(T))) &&
      is_aligned(args.values, args.value_stride * static_cast<int64_t>(sizeof(Out)));
  return groups;
}

template <class T, class Out>
void enqueue(const RoundRowsCuda& args, CUstream_st* stream) {
  const Groups groups = groups_of<T, Out>(args);
  const int64_t in_block = kThreads / groups.lanes;
  cuda::launch("experts.round_rows", &round_groups<T, Out>,
               {.blocks = ceil_div(args.num_rows * groups.of_row, in_block),
                .threads = kThreads,
                .stream = stream},
               args, groups);
}

template <class T>
void enqueue_from(const RoundRowsCuda& args, CUstream_st* stream) {
  args.value_dtype == DType::kF32 ? enqueue<T, float>(args, stream)
                                  : enqueue<T, __nv_bfloat16>(args, stream);
}

}  // namespace

RowRounding row_rounding(DType weights, const QuantSpec& quant) {
  const quant::ActivationRule rule = quant::activation_rule(weights, quant);
  return {.grid = quant::RowGrid::of(*rule.codes),
          .form = rule.form,
          .scale = rule.scale,
          .group = rule.group,
          .power_of_two = rule.power_of_two_scales,
          .largest_code = rule.codes->largest,
          .rounding = quant::power_rounding(rule)};
}

void round_rows_cuda(const RoundRowsCuda& args, CUstream_st* stream) {
  if (args.num_rows == 0 || args.columns == 0) return;
  switch (args.dtype) {
    case DType::kF32:
      return enqueue_from<float>(args, stream);
    case DType::kF16:
      return enqueue_from<__half>(args, stream);
    default:
      return enqueue_from<__nv_bfloat16>(args, stream);
  }
}

}  // namespace conclave::inline v0::experts
