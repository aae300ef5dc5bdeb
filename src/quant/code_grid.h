// The values of a format's codes in order, to tell how many steps a value lies from its code.
#pragma once

#include "quant/weight_format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

namespace conclave::inline v0::quant {

class CodeGrid {
 public:
  CodeGrid(const CodeBook& codes, int64_t bits) {
    const int count = 1 << bits;
    std::vector<float> ascending;
    for (int code = 0; code < count; ++code) {
      values_[static_cast<size_t>(code)] = codes.decode(static_cast<uint8_t>(code));
      const float value = values_[static_cast<size_t>(code)];
      if (std::isfinite(value)) ascending.push_back(value);
    }
    std::ranges::sort(ascending);
    least_ = ascending.front();
    largest_ = ascending.back();
    ascending.erase(std::unique(ascending.begin(), ascending.end()), ascending.end());
    for (int code = 0; code < count; ++code) set_gaps(ascending, static_cast<size_t>(code));
  }

  float least() const { return least_; }  // the ends of the finite values
  float largest() const { return largest_; }

  // |quotient - value of the code| over the distance of the next value on the quotient's side; the
  // outermost values have the same distance on both sides.
  double steps(double quotient, uint8_t code) const {
    const double off = quotient - double{values_[code]};
    return off >= 0 ? off / gap_above_[code] : -off / gap_below_[code];
  }

 private:
  void set_gaps(const std::vector<float>& ascending, size_t code) {
    const auto here = std::ranges::lower_bound(ascending, values_[code]);
    if (here == ascending.end() || *here != values_[code]) return;
    const bool first = here == ascending.begin();
    const bool last = here + 1 == ascending.end();
    const float below = first ? *(here + 1) - *here : *here - *(here - 1);
    gap_below_[code] = below;
    gap_above_[code] = last ? below : *(here + 1) - *here;
  }

  float least_ = 0;
  float largest_ = 0;
  std::array<float, 256> values_{};
  std::array<float, 256> gap_above_{};
  std::array<float, 256> gap_below_{};
};

}  // namespace conclave::inline v0::quant
