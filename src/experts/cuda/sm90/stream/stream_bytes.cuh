// The counterpart of stream.cuh for e4m3 weights and tokens.
#pragma once

#include "experts/cuda/sm90/stream/byte_consumer.cuh"
#include "experts/cuda/sm90/stream/stream.cuh"

namespace conclave::inline v0::experts::stream {

template <class Config, Product kProduct>
__global__ void __launch_bounds__(Config::kThreads, 1)
    stream_bytes_product(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  run_block<Config, kProduct, ByteConsumer<Config>>(
      params, *reinterpret_cast<SharedStorage<Config>*>(bytes));
}

}  // namespace conclave::inline v0::experts::stream
