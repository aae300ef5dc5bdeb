// The tiles of kernels of codes that stand for whole numbers, with offsets.
#pragma once

#include "experts/cuda/sm90/stream/byte_offset_kernels.h"
#include "experts/cuda/sm90/stream/byte_offsets.h"
#include "experts/cuda/sm90/stream/codes_tiles.cuh"
#include "experts/cuda/sm90/stream/offset_products.cuh"
#include "experts/cuda/sm90/stream/whole_bytes.cuh"

namespace conclave::inline v0::experts::stream {

// A block of codes with offsets.
template <class Config, Product kProduct, class OwnConsumer>
__device__ __forceinline__ void run_summed_block(const Params& params,
                                                 SummedStorage<Config>& shared) {
  if (threadIdx.x == 0) {
    for (uint64_t& full : shared.sums_full) ptx::mbarrier_init(&full, Config::kGatherWarps);
  }
  prepare<Config, kProduct>(params, shared);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  if (warp < Config::kConsumerWarps) {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    consume<Config, kProduct, OwnConsumer>(params, shared);
    return;
  }
  ptx::setmaxnreg_dec<Config::kProducerRegisters>();
  const int32_t helper = warp - Config::kConsumerWarps - 1;
  if (helper < 0) {
    if (ptx::elect_one()) produce<Config, kProduct>(params, shared);
  } else if constexpr (kRowsInOrder<Config, kProduct>) {
    sum_in_order<Config>(params, shared, helper);
  } else {
    gather_and_sum<Config>(params, shared, helper);
  }
}

template <class Config, Product kProduct>
__global__ void __launch_bounds__(Config::kThreads, 1)
    stream_offsets_product(const __grid_constant__ CodedParams params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  run_summed_block<Config, kProduct, Consumer<Config>>(
      params, *reinterpret_cast<SummedStorage<Config>*>(bytes));
}

template <class Config, class Parameters>
KernelOf<Parameters> describe_summed(void (*function)(const Parameters)) {
  constexpr size_t kBytes = sizeof(SummedStorage<Config>);
  static_assert(kBytes <= kMostSharedBytes, "a block has at most 227 KiB of shared memory");
  KernelOf<Parameters> kernel = describe_kernel<Config>(function);
  kernel.shared_bytes = kBytes;
  return kernel;
}

// Codes of 4 bits in the order of lanes, and int8; with `steps`, scales and offsets are
// FactorForm::kSteps.
constexpr Codes codes_with_offsets(int bits, bool steps) {
  return {.bits = bits, .steps_of_sum = 2, .offsets = true, .in_order = true, .steps = steps};
}

template <int kTokens, Codes kCodes, int kWeightRows>
constexpr Shape summed_shape() {
  constexpr CodeKernelForm kForm{.bits = kCodes.bits,
                                 .columns_of_sum = 16 * kCodes.steps_of_sum,
                                 .offsets = true,
                                 .in_order = true,
                                 .steps = kCodes.steps};
  constexpr bool kIsBytes = is_byte_offsets(kForm);
  return {.max_tokens = kTokens,
          .weight_rows = kWeightRows,
          .atoms = kIsBytes ? 2 : 4,
          .stages = kIsBytes ? byte_offset_stages(kForm.steps, kTokens, kWeightRows)
                             : code_stages(kForm, kTokens, kWeightRows),
          .consumers = kWeightRows / 64};
}
template <int kTokens, Codes kCodes, int kWeightRows = 128>
using SummedConfig = Config<__nv_bfloat16, summed_shape<kTokens, kCodes, kWeightRows>(), kCodes>;

template <int kTokens, Codes kCodes, int kWeightRows = 128>
CodesKernelPair pair_with_offsets() {
  using Own = SummedConfig<kTokens, kCodes, kWeightRows>;
  return {.up = describe_summed<Own>(stream_offsets_product<Own, Product::kUp>),
          .down = describe_summed<Own>(stream_offsets_product<Own, Product::kDown>)};
}

template <Codes kCodes>
CodesKernelPair find_with_offsets(const DeviceTile& tile) {
  const bool wide = tile.features == 256;
  switch (tile.tokens) {
    case 16:
      return wide ? pair_with_offsets<16, kCodes, 256>() : pair_with_offsets<16, kCodes>();
    case 32:
      return wide ? pair_with_offsets<32, kCodes, 256>() : pair_with_offsets<32, kCodes>();
    case 64:
      return pair_with_offsets<64, kCodes>();
    case 96:
      return pair_with_offsets<96, kCodes>();
    default:
      refuse_tile(tile);
  }
}

}  // namespace conclave::inline v0::experts::stream
