// The tensor copy engine (TMA) and its plain bulk copies.
#pragma once

#include "cuda/device/barrier.cuh"

#include <cstdint>
#include <cuda.h>

namespace conclave::inline v0::cuda::device {

// Says how long L2 should keep what a copy reads.
enum class CacheHint : uint64_t {
  kNormal = 0x1000000000000000,
  kEvictFirst = 0x12F0000000000000,  // read once: weights
  kEvictLast = 0x14F0000000000000,   // read by many blocks: activations
};

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// Load boxes of 2 to 5 dimensions into this block's shared memory; `barrier` counts their bytes
// on completion. Coordinates are element indexes, contiguous dimension first; they may be out of
// range.
__device__ __forceinline__ void tma_load_2d(const CUtensorMap* map, uint64_t* barrier,
                                            void* destination, int32_t c0, int32_t c1,
                                            CacheHint hint = CacheHint::kNormal) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(destination)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "r"(c0), "r"(c1),
      "l"(static_cast<uint64_t>(hint))
      : "memory");
}
__device__ __forceinline__ void tma_load_3d(const CUtensorMap* map, uint64_t* barrier,
                                            void* destination, int32_t c0, int32_t c1, int32_t c2,
                                            CacheHint hint = CacheHint::kNormal) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(destination)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2),
      "l"(static_cast<uint64_t>(hint))
      : "memory");
}
__device__ __forceinline__ void tma_load_4d(const CUtensorMap* map, uint64_t* barrier,
                                            void* destination, int32_t c0, int32_t c1, int32_t c2,
                                            int32_t c3, CacheHint hint = CacheHint::kNormal) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(destination)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2),
      "r"(c3), "l"(static_cast<uint64_t>(hint))
      : "memory");
}
__device__ __forceinline__ void tma_load_5d(const CUtensorMap* map, uint64_t* barrier,
                                            void* destination, int32_t c0, int32_t c1, int32_t c2,
                                            int32_t c3, int32_t c4,
                                            CacheHint hint = CacheHint::kNormal) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(destination)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2),
      "r"(c3), "r"(c4), "l"(static_cast<uint64_t>(hint))
      : "memory");
}

// Prefetches a box to L2.
__device__ __forceinline__ void tma_prefetch_3d(const CUtensorMap* map, int32_t c0, int32_t c1,
                                                int32_t c2) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

// Load the same box to the same offset in every block of the cluster that has its bit in `blocks`;
// each block's barrier at this offset counts the bytes.
__device__ __forceinline__ void tma_load_3d_multicast(const CUtensorMap* map, uint64_t* barrier,
                                                      void* destination, uint16_t blocks,
                                                      int32_t c0, int32_t c1, int32_t c2,
                                                      CacheHint hint = CacheHint::kNormal) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%4, %5, %6}], [%2], %3, %7;" ::"r"(
          shared_address(destination)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "h"(blocks), "r"(c0),
      "r"(c1), "r"(c2), "l"(static_cast<uint64_t>(hint))
      : "memory");
}
__device__ __forceinline__ void tma_load_5d_multicast(const CUtensorMap* map, uint64_t* barrier,
                                                      void* destination, uint16_t blocks,
                                                      int32_t c0, int32_t c1, int32_t c2,
                                                      int32_t c3, int32_t c4,
                                                      CacheHint hint = CacheHint::kNormal) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3, %9;" ::"r"(
          shared_address(destination)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "h"(blocks), "r"(c0),
      "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(static_cast<uint64_t>(hint))
      : "memory");
}

// Copies `bytes` contiguous bytes; all addresses and sizes are multiples of 16.
__device__ __forceinline__ void bulk_load(void* destination, const void* source, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(destination)),
      "l"(source), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
// Copies shared memory of this block to another of the cluster; the destination and the barrier,
// which is the other's, are addresses from map_to_block.
__device__ __forceinline__ void bulk_copy_to_block(uint32_t destination, const void* source,
                                                   uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(destination),
      "r"(shared_address(source)), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace conclave::inline v0::cuda::device
