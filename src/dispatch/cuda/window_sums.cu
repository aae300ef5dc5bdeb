#include "comm/nccl/window_layout.h"
#include "comm/nccl/window_steps.h"
#include "cuda/check.h"
#include "cuda/launch.h"
#include "dispatch/cuda/combine_params.h"
#include "dispatch/cuda/window_sums.cuh"
#include "dispatch/cuda/window_sums.h"

#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0::dispatch {
namespace {

static_assert(kWindowSumColumns == device::kPartColumns);

using Kernel = void (*)(comm::WindowParams, device::WindowSumParams);

using device::PartOf;

template <class Part>
Kernel kernel_of_rows() {
  return &device::window_sum_kernel<Part, Part, PartOf::kRows>;
}
// If everything joins the sum of slots, it travels in float32.
template <class Row>
Kernel kernel_of(PartOf part_of, DType travels) {
  if (part_of == PartOf::kAll) return &device::window_sum_kernel<Row, float, PartOf::kAll>;
  return travels == DType::kF32 ? &device::window_sum_kernel<Row, float, PartOf::kSlots>
                                : &device::window_sum_kernel<Row, Row, PartOf::kSlots>;
}

Kernel kernel_for(PartOf part_of, DType rows, DType travels) {
  if (part_of == PartOf::kRows) {
    switch (travels) {
      case DType::kF32:
        return kernel_of_rows<float>();
      case DType::kF16:
        return kernel_of_rows<__half>();
      default:
        return kernel_of_rows<__nv_bfloat16>();
    }
  }
  switch (rows) {
    case DType::kF32:
      return kernel_of<float>(part_of, travels);
    case DType::kF16:
      return kernel_of<__half>(part_of, travels);
    default:
      return kernel_of<__nv_bfloat16>(part_of, travels);
  }
}

PartOf part_of(const DeviceCombineArgs& args) {
  const bool only_routed =
      args.output_scale == 1 && args.routed_factor == 1 && args.routed_factors == nullptr &&
      args.identity == nullptr && args.output_bias == nullptr && args.shared_rows == nullptr &&
      args.shared_slots == 0 && args.residual_rows == nullptr && args.padding_mask == nullptr;
  if (only_routed && args.top_k == 0 && args.routed_rows != nullptr) return PartOf::kRows;
  return only_routed && args.routed_rows == nullptr ? PartOf::kSlots : PartOf::kAll;
}

device::WindowSumParams params_of(const WindowSums& sums) {
  device::WindowSumParams params{.part = combine_params(sums.part, 1),
                                 .units_per_row = 0,
                                 .first_row = {},
                                 .units = {},
                                 .same_rows = sums.num_rows.size() > 1,
                                 .own = sums.own,
                                 .scale = sums.scale,
                                 .live_tokens = sums.live_tokens,
                                 .out = device_tensor(sums.out, sums.out_stride, sums.out_dtype)};
  params.units_per_row = static_cast<int32_t>(params.part.units_per_row);
  for (size_t rank = 0; rank < sums.num_rows.size(); ++rank) {
    params.first_row[rank] = static_cast<int32_t>(sums.first_rows[rank]);
    params.units[rank] = static_cast<int32_t>(sums.num_rows[rank] * params.part.units_per_row);
    params.same_rows = params.same_rows && sums.first_rows[rank] == sums.first_rows[0] &&
                       sums.num_rows[rank] == sums.num_rows[0];
  }
  return params;
}

int64_t blocks_for(const comm::WindowParams& windows, const device::WindowSumParams& params) {
  const int32_t most = *std::max_element(params.units, params.units + windows.ranks);
  return comm::blocks_of_units(most, windows.lane_bits);
}

}  // namespace

void WindowSumKernel::enqueue(const comm::WindowParams& windows, CUstream_st* stream) const {
  const device::WindowSumParams params = params_of(sums_);
  cuda::launch(
      "dispatch.window_sums",
      kernel_for(part_of(sums_.part), sums_.part.expert_dtype, sums_.travels),
      {.blocks = blocks_for(windows, params), .threads = device::kSumThreads, .stream = stream},
      windows, params);
}

void prepare_window_sums() {
  cudaFuncAttributes ignored{};
  for (const PartOf part_of : {PartOf::kRows, PartOf::kSlots, PartOf::kAll}) {
    for (const DType rows : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const DType travels : {DType::kF32, rows}) {
        cuda::check(cudaFuncGetAttributes(&ignored, kernel_for(part_of, rows, travels)),
                    "cudaFuncGetAttributes");
      }
    }
  }
}

}  // namespace conclave::inline v0::dispatch
