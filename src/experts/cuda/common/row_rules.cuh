// The two rules by which rows become codes with a scale for each row, or for each group of e4m3:
// quantize_rows.h says what they mean.
#pragma once

#include "cuda/device/pack.cuh"
#include "experts/cuda/common/e4m3.cuh"
#include "experts/cuda/common/vocabulary.h"
#include "quant/int8/int8.h"

#include <cstdint>
#include <type_traits>

namespace conclave::inline v0::experts {

// Rows become codes, four to a word, and have a scale for their largest magnitude.
struct E4m3Rows {
  static __device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) {
    return pack_e4m3(a, b, c, d);
  }
  static __device__ __forceinline__ uint32_t pack_near(float a, float b, float c, float d) {
    return pack(a, b, c, d);
  }
  static __device__ __forceinline__ float scale(float amax, bool power_of_two) {
    return group_scale(amax, power_of_two);
  }
  // NaN does not count.
  static __device__ __forceinline__ float larger(float amax, float x) {
    return fmaxf(amax, fabsf(x));
  }
};
// No code of int8 says that a value is not finite: the scale of its row does.
struct Int8Rows {
  // Subnormal scales have few bits, so that a quotient may be well beyond the largest code.
  static __device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) {
    return ptx::pack_signed_bytes(__float2int_rn(a), __float2int_rn(b), __float2int_rn(c),
                                  __float2int_rn(d));
  }
  // Four quotients by a scale that is not subnormal: none is beyond the largest code, and a sum
  // that leaves no bits below the unit rounds to nearest even.
  static __device__ __forceinline__ uint32_t pack_near(float a, float b, float c, float d) {
    const auto code = [](float x) { return __float_as_uint(__fadd_rn(x, 0x1.8p23F)); };
    return __byte_perm(__byte_perm(code(a), code(b), 0x0040), __byte_perm(code(c), code(d), 0x0040),
                       0x5410);
  }
  static __device__ __forceinline__ float scale(float amax, bool power_of_two) {
    return amax < INFINITY ? quant::step_of(amax, quant::Int8::kLargest, power_of_two) : NAN;
  }
  // Bits of magnitudes compare as magnitudes do, and those of NaN are above.
  static __device__ __forceinline__ float larger(float amax, float x) {
    return __uint_as_float(max(__float_as_uint(amax), __float_as_uint(fabsf(x))));
  }
};

// The rule of rows beside weights of this type.
template <class Element>
using RowRuleOf = std::conditional_t<std::is_same_v<Element, int8_t>, Int8Rows, E4m3Rows>;

}  // namespace conclave::inline v0::experts
