// Shared memory of the other blocks of a cluster. Plans have no clusters where the code is for
// architectures before 9.0: there the functions trap.
#pragma once

#include "cuda/device/barrier.cuh"

#include <cstdint>

namespace conclave::inline v0::cuda::device {

// Loads the word at the same offset as `word` in block `rank` of the cluster. The call belongs
// between two cluster_sync: after the other block has written it, and before that block ends.
__device__ __forceinline__ uint32_t load_shared_cluster(const uint32_t* word, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  uint32_t value = 0;
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.u32 %0, [remote];\n"
      "}\n"
      : "=r"(value)
      : "r"(shared_address(word)), "r"(rank)
      : "memory");
  return value;
#else
  __trap();
  return 0;
#endif
}

// Stores to the word at the same offset as `word` in block `rank` of the cluster, which must have
// begun (a cluster_sync before) and sees the value after the next cluster_sync.
__device__ __forceinline__ void store_shared_cluster(uint32_t* word, uint32_t value,
                                                     uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.u32 [remote], %2;\n"
      "}\n" ::"r"(shared_address(word)),
      "r"(rank), "r"(value)
      : "memory");
#else
  __trap();
#endif
}

}  // namespace conclave::inline v0::cuda::device
