#include "cpu/ceilings/read-inl.h"

#include <immintrin.h>

namespace conclave::inline v0::cpu::ceilings {
namespace {

struct Zmm {
  using Register = __m512i;
  static constexpr size_t kBytes = 64;
  static Register zero() { return _mm512_setzero_si512(); }
  static Register load(const std::byte* data) { return _mm512_load_si512(data); }
  static Register combine(Register a, Register b) { return _mm512_xor_si512(a, b); }
  static uint64_t sum(Register value) {
    alignas(64) uint64_t lanes[8];
    _mm512_store_si512(lanes, value);
    uint64_t total = 0;
    for (const uint64_t lane : lanes) total += lane;
    return total;
  }
};

constexpr int kAccumulators = 24;

float fused_multiply_add(int64_t iterations) {
  const __m512 factor = _mm512_set1_ps(0.5F);
  const __m512 addend = _mm512_set1_ps(1.0F);
  __m512 sums[kAccumulators];
  for (__m512& sum : sums) sum = addend;
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 24
    for (__m512& sum : sums) sum = _mm512_fmadd_ps(sum, factor, addend);
  }
  for (int i = 1; i < kAccumulators; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  return _mm512_cvtss_f32(sums[0]);
}

}  // namespace

constinit const ReadFunctions kReadAvx512 = read_functions<Zmm>();
constinit const RateLoop kF32FmaAvx512{.run = fused_multiply_add,
                                       .flops_per_iteration = 2 * 16 * kAccumulators};

}  // namespace conclave::inline v0::cpu::ceilings
