#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "dispatch/cuda/combine.h"
#include "dispatch/cuda/combine_params.h"
#include "dispatch/cuda/combine_rows.cuh"

#include "conclave/error.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace conclave::inline v0::dispatch {
namespace {

using device::Terms;

constexpr int32_t kCombineThreads = 128;

// One warp per unit, or per few units one after another.
template <class Row, int kRows, int kParts, int kBlocksPerSm, Terms kTerms = Terms::kCommon>
__global__ void __launch_bounds__(kCombineThreads, kBlocksPerSm)
    combine_kernel(const __grid_constant__ device::CombineParams params) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t units = device::live_rows(params) * params.units_per_row;
  const int64_t warps = int64_t{gridDim.x} * (kCombineThreads / 32);
  int64_t unit = int64_t{blockIdx.x} * (kCombineThreads / 32) + threadIdx.x / 32;
  if (unit >= units) return;
  device::LaneSlot ahead = device::read_slots_ahead(params, unit);
  for (; unit < units; unit += warps) {
    const device::LaneSlot slots = ahead;
    if (unit + warps < units) ahead = device::read_slots_ahead(params, unit + warps);
    if constexpr (kParts > 1) {
      device::combine_unit<Row, kRows, kParts>(params, unit, slots);
    } else {
      device::combine_part<Row, kRows, kTerms>(params, unit, slots);
    }
  }
}

// rows x parts 16-byte loads are in flight per lane. Few rows per token leave room for more parts
// of each. The order of additions is the same in all shapes.
struct CombineShape {
  void (*kernel)(device::CombineParams);
  int parts;
};
template <class Row>
CombineShape common_shape(const DeviceCombineArgs& args) {
  // Below this there are too few warps for the device, so each takes one part.
  constexpr int64_t kManyColumns = int64_t{1} << 20;
  const bool many = args.num_tokens * args.hidden_size >= kManyColumns;
  if (!many || args.top_k > 4) return {combine_kernel<Row, 8, 1, 6>, 1};
  if (args.top_k > 2) return {combine_kernel<Row, 4, 2, 6>, 2};
  if (args.top_k > 1) return {combine_kernel<Row, 2, 4, 6>, 4};
  return {combine_kernel<Row, 1, 4, 8>, 4};
}

// Selects kAll if the call has a term that the common kernels lack.
Terms terms_of(const DeviceCombineArgs& args) {
  const bool common = args.routed_rows == nullptr && args.shared_slots == 0 &&
                      args.routed_factors == nullptr && args.routed_factor == 1.0F &&
                      args.residual_rows == nullptr;
  return common ? Terms::kCommon : Terms::kAll;
}

template <class Row>
CombineShape shape_of(const DeviceCombineArgs& args) {
  if constexpr (sizeof(Row) == 4) {
    return {combine_kernel<Row, 4, 1, 4, Terms::kAll>, 1};
  } else {
    if (terms_of(args) == Terms::kAll) return {combine_kernel<Row, 8, 1, 4, Terms::kAll>, 1};
    return common_shape<Row>(args);
  }
}

CombineShape shape_for(const DeviceCombineArgs& args) {
  switch (args.expert_dtype) {
    case DType::kF32:
      return shape_of<float>(args);
    case DType::kF16:
      return shape_of<__half>(args);
    default:
      return shape_of<__nv_bfloat16>(args);
  }
}

// With many units a warp requests a unit's slots while it sums the one before; few run all at once.
int64_t units_a_warp(int64_t units) { return units >= 65536 ? 3 : 1; }

bool aligned(const void* data, int64_t stride, DType dtype) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * byte_size(dtype) % 16 == 0;
}

void check_args(const DeviceCombineArgs& args) {
  if (aligned(args.expert_rows, args.expert_row_stride, args.expert_dtype)) return;
  throw Error(ErrorCode::kMisaligned,
              {.what = "combine reads expert rows 16 bytes at a time",
               .tensor = "expert_rows",
               .expected = "rows at multiples of 16 bytes",
               .found = "a stride of " + std::to_string(args.expert_row_stride) + " elements"});
}

}  // namespace

device::DeviceTensor device_tensor(const void* data, int64_t stride, DType dtype) {
  return {.data = const_cast<void*>(data),
          .stride = stride,
          .dtype = dtype,
          .aligned = aligned(data, stride, dtype)};
}

device::CombineParams combine_params(const DeviceCombineArgs& args, int parts) {
  return {
      .expert_rows = args.expert_rows,
      .expert_row_stride = args.expert_row_stride,
      .topk_ids = args.topk_ids,
      .topk_weights = args.topk_weights,
      .local_expert = args.local_expert,
      .num_experts = args.num_experts,
      .top_k = args.top_k,
      .routed_slots = args.top_k - args.shared_slots,
      .num_tokens = args.num_tokens,
      .live_tokens = args.live_tokens,
      .hidden_size = args.hidden_size,
      .units_per_row = ceil_div(args.hidden_size, int64_t{parts} * device::kPartColumns),
      .routed = device_tensor(args.routed_rows, args.routed_row_stride, DType::kF32),
      .scale = args.output_scale,
      .identity_weights = args.identity,
      .hidden = device_tensor(args.hidden, args.hidden_stride, args.hidden_dtype),
      .output_bias = args.output_bias,
      .mix = args.routed_factors,
      .constant_mix = args.routed_factor,
      .shared = device_tensor(args.shared_rows, args.shared_row_stride, args.shared_dtype),
      .num_shared = args.num_shared,
      .shared_factor = args.shared_factor,
      .shared_constant = args.shared_constant,
      .residual = device_tensor(args.residual_rows, args.residual_row_stride, args.residual_dtype),
      .padding_mask = args.padding_mask,
      .out = device_tensor(args.out, args.out_stride, args.out_dtype),
      .shared_out = device_tensor(args.shared_out, args.shared_out_stride, args.shared_out_dtype)};
}

void device_combine(const DeviceCombineArgs& args, CUstream_st* stream) {
  if (args.num_tokens == 0 || args.hidden_size == 0) return;
  check_args(args);
  const CombineShape shape = shape_for(args);
  const device::CombineParams params = combine_params(args, shape.parts);
  constexpr int64_t kMaxBlocks = int64_t{1} << 30;
  const int64_t units = args.num_tokens * params.units_per_row;
  const int64_t blocks = ceil_div(units, units_a_warp(units) * (kCombineThreads / 32));
  cuda::launch(
      "dispatch.combine", shape.kernel,
      {.blocks = std::min(kMaxBlocks, blocks), .threads = kCombineThreads, .stream = stream},
      params);
}

}  // namespace conclave::inline v0::dispatch
