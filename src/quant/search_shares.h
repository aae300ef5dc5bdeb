// The shares of the largest magnitude that a search tries as the end of the range.
#pragma once

#include <array>

namespace conclave::inline v0::quant {

// Below 0.6 more is lost at the end than is won in between, for values that look normal and groups
// of 16 to 1024.
inline constexpr std::array kShares = {0.975F, 0.95F, 0.925F, 0.9F, 0.875F, 0.85F, 0.825F, 0.8F,
                                       0.775F, 0.75F, 0.725F, 0.7F, 0.675F, 0.65F, 0.625F, 0.6F};

}  // namespace conclave::inline v0::quant
