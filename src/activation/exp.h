// exp as one polynomial over a vector type, so that every instruction set gives the same bits.
#pragma once

namespace conclave::inline v0::activation {

// exp(x) = mantissa * scale_high * scale_low. There are two scales, each a power of two that
// float32 holds: their product may be subnormal, and the caller chooses when to round into that
// range.
template <class V>
struct SplitExp {
  V mantissa;  // in [0.7, 1.42]
  V fraction;  // mantissa - 1 before its rounding: for exp(x) - 1 near zero
  V scale_high;
  V scale_low;
};

// Requires x in [-150, 88] or NaN; for NaN the mantissa is NaN and the other fields are
// unspecified. V has broadcast, add, sub, mul, fma(a, b, c) = a*b + c, and power_of_two(t).
template <class V>
inline SplitExp<V> split_exp(V x) {
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the mantissa.
  const V magic = V::broadcast(0x1.8p23F);
  const V shifted = V::fma(x, V::broadcast(0x1.715476p+0F), magic);
  const V exponent = V::sub(shifted, magic);
  // ln 2 is split in two, so that the remainder r in [-0.35, 0.35] keeps its low bits.
  V r = V::fma(exponent, V::broadcast(-0x1.62e43p-1F), x);
  r = V::fma(exponent, V::broadcast(0x1.05c61p-29F), r);

  // (exp(r) - 1 - r) / r^2, fitted for the least relative error of exp, 3.1e-9.
  V poly = V::broadcast(0x1.6a2256p-10F);
  poly = V::fma(poly, r, V::broadcast(0x1.123b02p-7F));
  poly = V::fma(poly, r, V::broadcast(0x1.5558f8p-5F));
  poly = V::fma(poly, r, V::broadcast(0x1.555490p-3F));
  poly = V::fma(poly, r, V::broadcast(0x1.fffffcp-2F));
  const V square = V::mul(r, r);
  const V fraction = V::fma(square, poly, r);
  const V mantissa = V::add(fraction, V::broadcast(1.0F));

  const V shifted_half = V::fma(exponent, V::broadcast(0.5F), magic);
  const V half = V::sub(shifted_half, magic);
  const V shifted_rest = V::add(V::sub(exponent, half), magic);
  return {mantissa, fraction, V::power_of_two(shifted_half), V::power_of_two(shifted_rest)};
}

}  // namespace conclave::inline v0::activation
