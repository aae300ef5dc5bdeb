// Copies by ordinary threads: cp.async, matrix stores and loads of shared memory, prefetches,
// atomics.
#pragma once

#include "cuda/device/barrier.cuh"

#include <cstdint>

namespace conclave::inline v0::cuda::device {

// Copies 16 bytes of global memory to shared memory through L2 only. If `valid` is false, writes
// zeros and does not read the source.
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination),
               "l"(source), "r"(bytes)
               : "memory");
}
// Copies the first `bytes` (0 to 16) of 16 bytes, followed by zeros.
__device__ __forceinline__ void cp_async_16_part(uint32_t destination, const void* source,
                                                 int32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination),
               "l"(source), "r"(bytes)
               : "memory");
}
// Copies 4 bytes, or writes zeros if `valid` is false.
__device__ __forceinline__ void cp_async_4(uint32_t destination, const void* source, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Store four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8
// and holds elements 2 (l % 4) and the next of row l / 4 of each; transposed, of column l / 4.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1,
                                                  uint32_t r2, uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

// Loads 16 bytes of shared memory.
__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}

__device__ __forceinline__ float load_shared_f32(uint32_t address) {
  float value = 0;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

// Loads 8 bytes of shared memory.
__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
  return value;
}

// Adds four float32 to memory at a multiple of 16 bytes, in L2, in no fixed order with other sums.
__device__ __forceinline__ void red_add_f32_4(float* sums, const float (&values)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums),
               "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
}

// Prefetches to L1 the 128 bytes around an address.
__device__ __forceinline__ void prefetch_l1(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}

// Flags between blocks of one grid.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
  uint32_t value = 0;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t add_release(uint32_t* counter, uint32_t value) {
  uint32_t before = 0;
  asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
}

__device__ __forceinline__ uint32_t add_relaxed(uint32_t* counter, uint32_t value) {
  uint32_t before = 0;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
}

// Replaces 16 bytes, aligned to 16, by `value` if they equal `expected`; returns their old value.
struct Word128 {
  uint64_t low = 0;
  uint64_t high = 0;
};
__device__ __forceinline__ Word128 compare_and_swap_128(void* address, Word128 expected,
                                                        Word128 value) {
  Word128 before;
  asm volatile(
      "{\n"
      ".reg .b128 expected, value, before;\n"
      "mov.b128 expected, {%3, %4};\n"
      "mov.b128 value, {%5, %6};\n"
      "atom.cas.relaxed.gpu.global.b128 before, [%2], expected, value;\n"
      "mov.b128 {%0, %1}, before;\n"
      "}\n"
      : "=l"(before.low), "=l"(before.high)
      : "l"(address), "l"(expected.low), "l"(expected.high), "l"(value.low), "l"(value.high)
      : "memory");
  return before;
}

}  // namespace conclave::inline v0::cuda::device
