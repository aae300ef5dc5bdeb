// Numbers as whole multiples of a unit, the greatest that they have in common, for as many columns
// at once as a vector has lanes. The bytes are those of pack_numbers.
#pragma once

#include "gemm/cpu/simd-inl.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

inline constexpr int kTileGroups = 16;
inline constexpr int kNoExponent = 128;  // beyond that of any odd part

// Vectors of columns that are worked on side by side: a division takes as long as four that do not
// wait for each other.
inline constexpr int kTogether = 4;

// Makes `a` the common divisors of whole numbers below 2^24, zero for none. No quotient of such
// numbers is rounded up to a whole one: it would lie within 2^-24 of it, relatively, and differ by
// 1 / b, more than a 2^24-th.
template <class Square>
CONCLAVE_KERNEL_INLINE void take_common_divisors(typename Square::Floats* a,
                                                 typename Square::Floats* b) {
  using Ints = typename Square::Ints;
  using Floats = typename Square::Floats;
  while (true) {
    Ints is_left[kTogether];
    Ints is_any{};
#pragma GCC unroll 4
    for (int j = 0; j < kTogether; ++j) {
      is_left[j] = b[j] != 0.0F;
      is_any |= is_left[j];
    }
    if (!Square::any(reinterpret_cast<typename Square::Vector>(is_any))) return;
#pragma GCC unroll 4
    for (int j = 0; j < kTogether; ++j) {
      const Floats divisor = is_left[j] ? b[j] : Floats{} + 1.0F;
      const Floats quotient =
          __builtin_convertvector(__builtin_convertvector(a[j] / divisor, Ints), Floats);
      const Floats rest = a[j] - quotient * divisor;
      a[j] = is_left[j] ? b[j] : a[j];
      b[j] = is_left[j] ? rest : Floats{};
    }
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

// The units of some vectors of columns.
template <class Square>
struct CommonUnits {
  using Ints = typename Square::Ints;
  using Floats = typename Square::Floats;
  Floats units[kTogether];
  Ints unfit{};  // not 0 for columns with numbers too small, or too large, for this arithmetic

  // numbers[j][i] has those of vector j of group i.
  CONCLAVE_KERNEL_INLINE CommonUnits(const Ints* const* numbers, int count) {
    Floats divisors[kTogether] = {};
    Ints exponents[kTogether];
    for (Ints& exponent : exponents) exponent = Ints{} + kNoExponent;
    for (int i = 0; i < count; ++i) {
      Floats odd[kTogether];
#pragma GCC unroll 4
      for (int j = 0; j < kTogether; ++j) {
        const Ints bits = numbers[j][i] & 0x7fffffff;
        unfit |= (bits >= 0x7f800000) | ((bits != 0) & (bits < 0x00800000));
        const OddParts<Square> parts(bits);
        exponents[j] = parts.exponent < exponents[j] ? parts.exponent : exponents[j];
        odd[j] = parts.odd;
      }
      take_common_divisors<Square>(odd, divisors);
#pragma GCC unroll 4
      for (int j = 0; j < kTogether; ++j) divisors[j] = odd[j];
    }
#pragma GCC unroll 4
    for (int j = 0; j < kTogether; ++j) {
      const Ints has_unit = divisors[j] != 0.0F;
      const Ints scaled = reinterpret_cast<Ints>(divisors[j]) + exponents[j] * 0x00800000;
      unfit |= has_unit & (scaled < 0x00800000);
      const auto unit = reinterpret_cast<Floats>(has_unit ? scaled : Ints{});
      // 128 steps are as many of the opposite unit, and less than 0.
      Ints is_high{};
      for (int i = 0; i < count; ++i) {
        is_high |= reinterpret_cast<Floats>(numbers[j][i]) > unit * 127.0F;
      }
      units[j] = is_high ? -unit : unit;
    }
  }
};

// Packs the numbers of `count` groups, whose steps lie a panel row apart. Returns lanes that are
// not 0 for columns whose numbers are no steps, or none that this arithmetic finds.
template <class Square>
CONCLAVE_KERNEL_INLINE auto put_steps(const typename Square::Ints* const* numbers, int count,
                                      std::byte* steps, std::byte* units) {
  using Ints = typename Square::Ints;
  using Floats = typename Square::Floats;
  constexpr int kRow = 64;
  const CommonUnits<Square> common(numbers, count);
  Ints unfit = common.unfit;
  for (int j = 0; j < kTogether; ++j) {
    const Floats unit = common.units[j];
    __builtin_memcpy(units + j * int{sizeof(unit)}, &unit, sizeof(unit));
    const Floats divisor = unit != 0.0F ? unit : Floats{} + 1.0F;
    for (int i = 0; i < count; ++i) {
      const auto number = reinterpret_cast<Floats>(numbers[j][i]);
      const Floats step = number / divisor;
      const Ints is_within = (step >= -128.0F) & (step <= 127.0F);
      const Ints whole = __builtin_convertvector(is_within ? step : Floats{}, Ints);
      unfit |= ~is_within | (__builtin_convertvector(whole, Floats) * unit != number);
      Square::store_bytes(reinterpret_cast<typename Square::Vector>(whole),
                          steps + i * kRow + j * Square::kSize);
    }
  }
  return unfit;
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
