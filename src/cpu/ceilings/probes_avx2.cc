#include "cpu/ceilings/read-inl.h"

#include <immintrin.h>

namespace conclave::inline v0::cpu::ceilings {
namespace {

struct Ymm {
  using Register = __m256i;
  static constexpr size_t kBytes = 32;
  static Register zero() { return _mm256_setzero_si256(); }
  static Register load(const std::byte* data) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(data));
  }
  static Register combine(Register a, Register b) { return _mm256_xor_si256(a, b); }
  static uint64_t sum(Register value) {
    alignas(32) uint64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), value);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
  }
};

// Latency 4 on two ports needs 8 accumulators; more than 12 would not fit 16 registers.
constexpr int kAccumulators = 12;

float fused_multiply_add(int64_t iterations) {
  const __m256 factor = _mm256_set1_ps(0.5F);
  const __m256 addend = _mm256_set1_ps(1.0F);
  __m256 sums[kAccumulators];
  for (__m256& sum : sums) sum = addend;
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 24
    for (__m256& sum : sums) sum = _mm256_fmadd_ps(sum, factor, addend);
  }
  for (int i = 1; i < kAccumulators; ++i) sums[0] = _mm256_add_ps(sums[0], sums[i]);
  return _mm256_cvtss_f32(sums[0]);
}

}  // namespace

constinit const ReadFunctions kReadAvx2 = read_functions<Ymm>();
constinit const RateLoop kF32FmaAvx2{.run = fused_multiply_add,
                                     .flops_per_iteration = 2 * 8 * kAccumulators};

}  // namespace conclave::inline v0::cpu::ceilings
