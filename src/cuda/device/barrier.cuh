// mbarriers, which TMA signals and consumers wait on. Addresses lie in the shared window.
#pragma once

#include <cstdint>

namespace conclave::inline v0::cuda::device {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to TMA and to the other blocks of a cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Makes earlier ordinary stores to shared memory visible to TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Does the same for every state space, which is needed before TMA reads global memory that ordinary
// stores wrote.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  mbarrier_arrive(shared_address(barrier));
}

// Arrives once at the barrier at the same offset in block `rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// Maps `address` in this block's shared memory to the same place in block `rank` of the cluster.
__device__ __forceinline__ uint32_t map_to_block(uint32_t address, uint32_t rank) {
  uint32_t mapped = 0;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
// Arrives once at a barrier of any block of the cluster, at an address from map_to_block. For
// threads that wrote nothing that the waiting ones read: it saves the fence over the cluster, which
// waits for all stores in flight.
__device__ __forceinline__ void mbarrier_arrive_relaxed(uint32_t mapped) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapped)
               : "memory");
}

// Arrives once and expects `bytes` more from TMA.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Expects `bytes` more, without an arrival.
__device__ __forceinline__ void mbarrier_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Arrives once when this thread's cp.async so far have landed (the barrier's count includes that).
// Their data is in the generic proxy: wgmma needs fence_proxy_async_shared as well.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint32_t address, uint32_t parity) {
  uint32_t done = 0;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(address), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  return mbarrier_try_wait(shared_address(barrier), parity);
}

// Waits until the phase of this parity has completed. A fresh barrier has completed parity 1.
__device__ __forceinline__ void mbarrier_wait(uint32_t address, uint32_t parity) {
  while (!mbarrier_try_wait(address, parity)) {
  }
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  mbarrier_wait(shared_address(barrier), parity);
}

// `threads` threads (a multiple of 32) meet at hardware barrier `id`, 1 to 15; __syncthreads has 0.
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Writes 4 bytes to shared memory of block `rank` of the cluster, at the offset of `destination`,
// and arrives at the barrier there at the offset of `barrier`: threads that wait on it with
// mbarrier_wait_cluster see them.
__device__ __forceinline__ void publish_to_cluster(void* destination, uint32_t value,
                                                   uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there, signal;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 signal, %2, %3;\n"
      "st.shared::cluster.u32 [there], %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [signal];\n"
      "}\n" ::"r"(shared_address(destination)),
      "r"(value), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}
// The same for 16 bytes, aligned to 16.
__device__ __forceinline__ void publish_to_cluster(void* destination, int4 value, uint64_t* barrier,
                                                   uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there, signal;\n"
      "mapa.shared::cluster.u32 there, %0, %6;\n"
      "mapa.shared::cluster.u32 signal, %5, %6;\n"
      "st.shared::cluster.v4.b32 [there], {%1, %2, %3, %4};\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [signal];\n"
      "}\n" ::"r"(shared_address(destination)),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ void mbarrier_wait_cluster(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank = 0;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Plans have no clusters where the code is for architectures before 9.0.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#else
  __trap();
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __trap();
#endif
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

}  // namespace conclave::inline v0::cuda::device
