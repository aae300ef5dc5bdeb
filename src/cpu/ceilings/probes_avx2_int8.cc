#include "cpu/ceilings/byte_rate-inl.h"

namespace conclave::inline v0::cpu::ceilings {
namespace {

// Weights of 4 bits take these instructions; those of 8 bits take more.
struct Vpmaddubsw {
  static void add(__m256i& sum, __m256i factors) {
    __m256i pairs;
    // Spelled out: the products of equal factors would be computed once.
    __asm__("vpmaddubsw %1, %1, %0" : "=x"(pairs) : "x"(factors), "x"(sum));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
};

}  // namespace

constinit const RateLoop kInt8DotAvx2{.run = byte_products<Vpmaddubsw>,
                                      .flops_per_iteration = kByteFlops};

}  // namespace conclave::inline v0::cpu::ceilings
