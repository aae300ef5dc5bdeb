#include "cpu/ceilings/probe_functions.h"

#include <immintrin.h>

namespace conclave::inline v0::cpu::ceilings {
namespace {

constexpr int kAccumulators = 24;

float dot_products(int64_t iterations) {
  const __m512i factors = _mm512_set1_epi8(1);
  __m512i sums[kAccumulators];
  // Every loop over the sums is unrolled: one that is not keeps them all in memory.
#pragma GCC unroll 24
  for (__m512i& sum : sums) sum = _mm512_set1_epi32(1);
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 24
    for (__m512i& sum : sums) {
      // Spelled out: GCC gives the intrinsic's sum another register each time, and spills some.
      __asm__("vpdpbusd %1, %1, %0" : "+v"(sum) : "v"(factors));
    }
  }
#pragma GCC unroll 24
  for (int i = 1; i < kAccumulators; ++i) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
  return static_cast<float>(_mm512_reduce_add_epi32(sums[0]));
}

}  // namespace

// There are four products and four sums in each of 16 lanes.
constinit const RateLoop kInt8DotAvx512{.run = dot_products,
                                        .flops_per_iteration = 8 * 16 * kAccumulators};

}  // namespace conclave::inline v0::cpu::ceilings
