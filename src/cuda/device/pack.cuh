// Conversions of several numbers to one word.
#pragma once

#include <cstdint>

namespace conclave::inline v0::cuda::device {

// Four numbers as signed bytes, `a` in the lowest; those beyond become the nearest byte.
__device__ __forceinline__ uint32_t pack_signed_bytes(int32_t a, int32_t b, int32_t c, int32_t d) {
  uint32_t upper = 0;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(upper) : "r"(d), "r"(c), "r"(0));
  uint32_t word = 0;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(b), "r"(a), "r"(upper));
  return word;
}

}  // namespace conclave::inline v0::cuda::device
