// Selects the k best of a row, best first, ties to the lower index.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace conclave::inline v0::routing {

template <class Float>
inline constexpr Float kLowest = -std::numeric_limits<Float>::infinity();

template <class Float>
Float comparable(Float key) {
  return std::isnan(key) ? kLowest<Float> : key;
}

namespace detail {

// Moves worse entries down and puts the key in its place. Equal keys arrive in ascending index, and
// `>` keeps the earlier one ahead.
template <class Float>
void insert(Float key, int64_t index, int64_t last, int32_t* ids, Float* best) {
  int64_t at = last;
  for (; at > 0 && key > best[at - 1]; --at) {
    best[at] = best[at - 1];
    ids[at] = ids[at - 1];
  }
  best[at] = key;
  ids[at] = static_cast<int32_t>(index);
}

}  // namespace detail

// keys [count] -> ids [k] and their keys; NaN counts as -inf. Needs 1 <= k <= count. The outputs
// hold the best so far in order, so no scratch is needed.
template <class Float>
void select_best(const Float* keys, int64_t count, int64_t k, int32_t* ids, Float* best) {
  for (int64_t index = 0; index < k; ++index) {
    detail::insert(comparable(keys[index]), index, index, ids, best);
  }
  // The worst stays in a register: most keys are only compared with it. NaN is never above it.
  Float worst = best[k - 1];
  for (int64_t index = k; index < count; ++index) {
    if (!(keys[index] > worst)) continue;
    detail::insert(keys[index], index, k - 1, ids, best);
    worst = best[k - 1];
  }
}

}  // namespace conclave::inline v0::routing
