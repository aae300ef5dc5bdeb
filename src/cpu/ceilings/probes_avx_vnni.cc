#include "cpu/ceilings/byte_rate-inl.h"

namespace conclave::inline v0::cpu::ceilings {
namespace {

struct Vpdpbusd {
  static void add(__m256i& sum, __m256i factors) {
    // Spelled out: AVX-512 has an instruction of this name too.
    __asm__("%{vex%} vpdpbusd %1, %1, %0" : "+x"(sum) : "x"(factors));
  }
};

}  // namespace

constinit const RateLoop kInt8DotAvxVnni{.run = byte_products<Vpdpbusd>,
                                         .flops_per_iteration = kByteFlops};

}  // namespace conclave::inline v0::cpu::ceilings
