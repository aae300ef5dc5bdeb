#include "cpu/ceilings/read-inl.h"

namespace conclave::inline v0::cpu::ceilings {
namespace {

struct Word {
  using Register = uint64_t;
  static constexpr size_t kBytes = 8;
  static Register zero() { return 0; }
  static Register load(const std::byte* data) {
    Register value;
    __builtin_memcpy(&value, data, sizeof(value));
    return value;
  }
  static Register combine(Register a, Register b) { return a ^ b; }
  static uint64_t sum(Register value) { return value; }
};

// Every x86-64 has these registers; the compiler turns the arithmetic into SSE2.
using Float4 = float __attribute__((vector_size(16)));
constexpr int kAccumulators = 12;

float multiply_add(int64_t iterations) {
  Float4 sums[kAccumulators] = {};
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 24
    for (Float4& sum : sums) sum = sum * 0.5F + 1.0F;
  }
  Float4 total = {};
  for (const Float4& sum : sums) total += sum;
  return total[0] + total[1] + total[2] + total[3];
}

}  // namespace

constinit const ReadFunctions kReadScalar = read_functions<Word>();
constinit const RateLoop kF32Scalar{.run = multiply_add,
                                    .flops_per_iteration = 2 * 4 * kAccumulators};

}  // namespace conclave::inline v0::cpu::ceilings
