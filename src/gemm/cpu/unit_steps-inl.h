// Numbers as whole multiples of a unit, the greatest that they have in common, for as many columns
// at once as a vector has lanes. The bytes are those of pack_numbers.
#pragma once

#include "gemm/cpu/simd-inl.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

inline constexpr int kTileGroups = 16;
inline constexpr int kNoExponent = 128;  // beyond that of any odd part

// Whole numbers below 2^24, zero for none. No quotient of such numbers is rounded up to a whole
// one: it would lie within 2^-24 of it, relatively, and differ by 1 / b, more than a 2^24-th.
template <class Square>
CONCLAVE_KERNEL_INLINE auto common_divisor(typename Square::Floats a, typename Square::Floats b) {
  using Ints = typename Square::Ints;
  using Floats = typename Square::Floats;
  while (true) {
    const Ints is_left = b != 0.0F;
    if (!Square::any(reinterpret_cast<typename Square::Vector>(is_left))) return a;
    const Floats divisor = is_left ? b : Floats{} + 1.0F;
    const Floats quotient =
        __builtin_convertvector(__builtin_convertvector(a / divisor, Ints), Floats);
    const Floats rest = a - quotient * divisor;
    a = is_left ? b : a;
    b = is_left ? rest : Floats{};
  }
}

// Positive numbers but subnormal ones, and zeros, as odd * 2^exponent.
template <class Square>
struct OddParts {
  typename Square::Floats odd;
  typename Square::Ints exponent;  // kNoExponent: of zeros

  CONCLAVE_KERNEL_INLINE explicit OddParts(typename Square::Ints bits) {
    using Ints = typename Square::Ints;
    const Ints is_zero = bits == 0;
    const Ints mantissa = (bits & 0x007fffff) | 0x00800000;
    const auto lowest = __builtin_convertvector(mantissa & -mantissa, typename Square::Floats);
    const Ints zeros = (reinterpret_cast<Ints>(lowest) >> 23) - 127;
    const Ints whole = mantissa >> zeros;
    odd = __builtin_convertvector(is_zero ? Ints{} : whole, typename Square::Floats);
    exponent = is_zero ? Ints{} + kNoExponent : (bits >> 23) - 150 + zeros;
  }
};

// Packs the numbers of `count` groups, whose steps lie a panel row apart. Returns lanes that are
// not 0 for columns whose numbers are no steps, or too small for this arithmetic.
template <class Square>
CONCLAVE_KERNEL_INLINE auto put_steps(const typename Square::Ints* numbers, int count,
                                      std::byte* steps, std::byte* units) {
  using Ints = typename Square::Ints;
  using Floats = typename Square::Floats;
  constexpr int kRow = 64;
  Floats divisor{};
  Ints exponent = Ints{} + kNoExponent;
  Ints unfit{};
  for (int i = 0; i < count; ++i) {
    const Ints bits = numbers[i] & 0x7fffffff;
    unfit |= (bits >= 0x7f800000) | ((bits != 0) & (bits < 0x00800000));
    const OddParts<Square> parts(bits);
    exponent = parts.exponent < exponent ? parts.exponent : exponent;
    divisor = common_divisor<Square>(parts.odd, divisor);
  }
  const Ints has_unit = divisor != 0.0F;
  const Ints scaled = reinterpret_cast<Ints>(divisor) + exponent * 0x00800000;
  unfit |= has_unit & (scaled < 0x00800000);
  Floats unit = reinterpret_cast<Floats>(has_unit ? scaled : Ints{});
  Ints is_high{};
  for (int i = 0; i < count; ++i) is_high |= reinterpret_cast<Floats>(numbers[i]) > unit * 127.0F;
  unit = is_high ? -unit : unit;
  __builtin_memcpy(units, &unit, sizeof(unit));
  const Floats divided_by = has_unit ? unit : Floats{} + 1.0F;
  for (int i = 0; i < count; ++i) {
    const auto number = reinterpret_cast<Floats>(numbers[i]);
    const Floats step = number / divided_by;
    const Ints is_within = (step >= -128.0F) & (step <= 127.0F);
    const Ints whole = __builtin_convertvector(is_within ? step : Floats{}, Ints);
    unfit |= ~is_within | (__builtin_convertvector(whole, Floats) * unit != number);
    Square::store_bytes(reinterpret_cast<typename Square::Vector>(whole), steps + i * kRow);
  }
  return unfit;
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
