// The counterpart of stream.cuh for weights and tokens of e4m3, and of int8.
#pragma once

#include "experts/cuda/sm90/stream/byte_consumer.cuh"
#include "experts/cuda/sm90/stream/row_code_consumer.cuh"
#include "experts/cuda/sm90/stream/stream.cuh"

#include <cstdint>
#include <type_traits>

namespace conclave::inline v0::experts::stream {

template <class Config, Product kProduct>
__global__ void __launch_bounds__(Config::kThreads, 1)
    stream_bytes_product(const __grid_constant__ ByteParams params) {
  constexpr bool kMakesRows = kProduct == Product::kUp && Config::kScaling == Scaling::kRow;
  using Consumer = std::conditional_t<kMakesRows, RowCodeConsumer<Config>, ByteConsumer<Config>>;
  extern __shared__ __align__(1024) uint8_t bytes[];
  run_block<Config, kProduct, Consumer>(params, *reinterpret_cast<SharedStorage<Config>*>(bytes));
}

}  // namespace conclave::inline v0::experts::stream
