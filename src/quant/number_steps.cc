#include "quant/number_steps.h"

#include "core/float_convert.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace conclave::inline v0::quant {
namespace {

// A number but 0 as odd * 2^exponent. For one that is not finite the result means nothing.
struct Odd {
  int32_t odd = 0;
  int exponent = 0;
};
Odd odd_of(float value) {
  constexpr uint32_t kHidden = uint32_t{1} << 23;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const int biased = static_cast<int>(bits >> 23 & 0xffU);
  const uint32_t mantissa = (bits & (kHidden - 1)) | (biased != 0 ? kHidden : 0);
  const int zeros = std::countr_zero(mantissa);
  return {static_cast<int32_t>(mantissa >> zeros), std::max(biased, 1) - 150 + zeros};
}

// The largest number of which all are whole multiples; 0 if all are 0.
float common_unit(std::span<const float> numbers) {
  int32_t divisor = 0;
  int exponent = 0;
  for (const float number : numbers) {
    if (number == 0) continue;
    const Odd parts = odd_of(number);
    exponent = divisor == 0 ? parts.exponent : std::min(exponent, parts.exponent);
    // Once the unit is found all that follow are its multiples, and one division says so.
    if (divisor == 0 || parts.odd % divisor != 0) divisor = std::gcd(divisor, parts.odd);
  }
  return std::ldexp(static_cast<float>(divisor), exponent);
}

}  // namespace

std::optional<float> unit_of_small_steps(std::span<const float> numbers, int most) {
  const bool has_less = std::ranges::any_of(numbers, [](float number) { return number < 0; });
  const float unit = has_less ? -common_unit(numbers) : common_unit(numbers);
  int largest = 0;
  for (const float number : numbers) {
    int8_t step = 0;
    if (!find_step(number, unit, step) || step < 0) return std::nullopt;
    largest = std::max(largest, int{step});
  }
  // Numbers of f16 times a step may be multiples of one that f16 does not hold.
  for (int parts = 1; largest * parts <= most; ++parts) {
    const float part = unit / static_cast<float>(parts);
    const bool is_exact = part * static_cast<float>(parts) == unit;
    if (is_exact && f16_to_float(float_to_f16(part)) == part) return part;
    if (largest == 0) break;
  }
  return std::nullopt;
}

float unit_of_steps(std::span<const float> numbers) {
  const float unit = common_unit(numbers);
  // 128 steps are as many of the opposite unit, and less than 0.
  const bool has_128 =
      std::ranges::any_of(numbers, [&](float number) { return number > 127 * unit; });
  return has_128 ? -unit : unit;
}

}  // namespace conclave::inline v0::quant
