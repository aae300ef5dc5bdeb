#include "cpu/ceilings/probe_functions.h"

#include <immintrin.h>

namespace conclave::inline v0::cpu::ceilings {
namespace {

constexpr int kAccumulators = 24;

float dot_products(int64_t iterations) {
  // Each element holds 2^-40 twice: sums stay small however long the loop runs.
  const auto factors = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x2b802b80));
  __m512 sums[kAccumulators];
  for (__m512& sum : sums) sum = _mm512_set1_ps(1.0F);
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 24
    for (__m512& sum : sums) sum = _mm512_dpbf16_ps(sum, factors, factors);
  }
  for (int i = 1; i < kAccumulators; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  return _mm512_cvtss_f32(sums[0]);
}

}  // namespace

// There are two products and two sums in each of 16 lanes.
constinit const RateLoop kDpBf16Avx512{.run = dot_products,
                                       .flops_per_iteration = 4 * 16 * kAccumulators};

}  // namespace conclave::inline v0::cpu::ceilings
