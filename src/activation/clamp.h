// Clamps that let NaN through: min and max return their second operand if either is NaN.
#pragma once

namespace conclave::inline v0::activation {

template <class V>
inline V at_most(V x, float limit) {
  return V::min(V::broadcast(limit), x);
}
template <class V>
inline V within(V x, float limit) {
  return V::max(V::broadcast(-limit), at_most(x, limit));
}

inline double at_most(double x, float limit) { return x > limit ? double{limit} : x; }
inline double within(double x, float limit) {
  return x < -limit ? -double{limit} : at_most(x, limit);
}

}  // namespace conclave::inline v0::activation
