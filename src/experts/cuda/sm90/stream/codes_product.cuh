// Kernels of the products whose weights are codes.
#pragma once

#include "experts/cuda/sm90/stream/launch.h"
#include "experts/cuda/sm90/stream/stream.cuh"

namespace conclave::inline v0::experts::stream {

template <class Config, Product kProduct>
__global__ void __launch_bounds__(Config::kThreads, 1)
    stream_codes_product(const __grid_constant__ CodedParams params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(bytes);
  if constexpr (takes_table(Config::kCodes)) fill_values(params, shared);
  run_block<Config, kProduct, Consumer<Config>>(params, shared);
}

template <Shape kShape, Codes kCodes>
KernelPairOf<CodedParams> codes_kernels() {
  using Own = Config<__nv_bfloat16, kShape, kCodes>;
  return {.up = describe_kernel<Own>(stream_codes_product<Own, Product::kUp>),
          .down = describe_kernel<Own>(stream_codes_product<Own, Product::kDown>)};
}

}  // namespace conclave::inline v0::experts::stream
