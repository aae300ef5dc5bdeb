// The loop that measures products of bytes in registers of 256 bits, for files of one instruction
// set that have a Product of them.
#pragma once

#include "cpu/ceilings/probe_functions.h"

#include <immintrin.h>

namespace conclave::inline v0::cpu::ceilings {
namespace {

// As many sums as the kernels have; the rest of the 16 registers is for what they add up.
constexpr int kByteSums = 12;

template <class Product>
float byte_products(int64_t iterations) {
  const __m256i factors = _mm256_set1_epi8(1);
  __m256i sums[kByteSums];
  // Every loop over the sums is unrolled: one that is not keeps them all in memory.
#pragma GCC unroll 12
  for (__m256i& sum : sums) sum = _mm256_set1_epi32(1);
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (__m256i& sum : sums) Product::add(sum, factors);
  }
#pragma GCC unroll 12
  for (int i = 1; i < kByteSums; ++i) sums[0] = _mm256_add_epi32(sums[0], sums[i]);
  return static_cast<float>(_mm256_cvtsi256_si32(sums[0]));
}

// There are four products and four sums in each of 8 lanes.
constexpr int64_t kByteFlops = 8 * 8 * kByteSums;

}  // namespace
}  // namespace conclave::inline v0::cpu::ceilings
