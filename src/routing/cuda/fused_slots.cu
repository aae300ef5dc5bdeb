#include "routing/cuda/fused_slots.h"
#include "routing/cuda/rows.cuh"

#include <cstdint>

namespace conclave::inline v0::routing {
namespace {

constexpr int32_t kSlotThreads = 128;

__device__ float given_weight(const DeviceFusedSlots& args, int64_t token, int32_t slot) {
  const int64_t at = token * args.weights_stride + slot;
  switch (args.weights_dtype) {
    case DType::kF32:
      return static_cast<const float*>(args.given_weights)[at];
    case DType::kF16:
      return cuda::device::widen(static_cast<const __half*>(args.given_weights)[at]);
    default:
      return cuda::device::widen(static_cast<const __nv_bfloat16*>(args.given_weights)[at]);
  }
}

__global__ void __launch_bounds__(kSlotThreads)
    fused_slots_kernel(const __grid_constant__ DeviceFusedSlots args) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t item = int64_t{blockIdx.x} * kSlotThreads + threadIdx.x;
  if (item >= args.num_tokens * args.num_shared) return;
  const int64_t token = item / args.num_shared;
  const auto shared = static_cast<int32_t>(item % args.num_shared);
  const int32_t slot = args.top_k + shared;
  const int32_t own_id = args.num_experts + shared;
  const bool live = args.live_tokens == nullptr || token < *args.live_tokens;
  const bool used = live && (args.padding_mask == nullptr || args.padding_mask[token]);
  float weight = args.slot_weight;
  if (args.given_weights != nullptr) weight = given_weight(args, token, slot);
  if (used && args.given_ids != nullptr) {
    const int64_t id =
        device::load_index(args.given_ids, args.ids_dtype, token * args.ids_stride + slot);
    if (id != own_id) weight = 0;
    if (id != own_id && id != -1) device::add_one(args.skipped_ids);
  }
  args.shared_weights[item] = weight;
  if (args.captured_ids != nullptr) {
    args.captured_ids[token * args.captured_ids_stride + slot] =
        used && weight != 0.0F ? own_id : -1;
  }
  if (args.captured_weights != nullptr) {
    args.captured_weights[token * args.captured_weights_stride + slot] = weight;
  }
}

}  // namespace

void device_fused_slots(const DeviceFusedSlots& args, CUstream_st* stream) {
  if (args.num_tokens == 0) return;
  cuda::launch("routing.fused_slots", fused_slots_kernel,
               {.blocks = ceil_div(args.num_tokens * args.num_shared, int64_t{kSlotThreads}),
                .threads = kSlotThreads,
                .stream = stream},
               args);
}

}  // namespace conclave::inline v0::routing
