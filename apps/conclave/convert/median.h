// The middle of a list of errors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace conclave::tool {

// The upper one of two middles; 0 for no values.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace conclave::tool
