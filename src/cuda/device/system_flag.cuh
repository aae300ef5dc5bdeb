// Flags that devices of one host raise in each other's memory, a fence, and a choice that threads
// make alike.
#pragma once

#include <cstdint>

namespace conclave::inline v0::cuda::device {

// Stores, so that whoever sees the value sees everything that this thread has seen or stored
// before.
__device__ __forceinline__ void store_release_system(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ void store_release_system(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

// Orders what this thread has seen or stored before what it stores next, as the device's threads
// see it. __threadfence() also puts all such fences in one order, for which nobody here asks.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

// True on all of `threads` threads (a multiple of 32) at hardware barrier `id`, 1 to 15, if one of
// them says so.
__device__ __forceinline__ bool named_barrier_or(uint32_t id, uint32_t threads, bool mine) {
  uint32_t any = 0;
  asm volatile(
      "{\n"
      ".reg .pred in, out;\n"
      "setp.ne.u32 in, %3, 0;\n"
      "bar.red.or.pred out, %1, %2, in;\n"
      "selp.u32 %0, 1, 0, out;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(mine))
      : "memory");
  return any != 0;
}

}  // namespace conclave::inline v0::cuda::device
