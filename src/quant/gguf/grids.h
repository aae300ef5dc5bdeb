// Points of grids, 8 elements each, of IQ3 types 4. An index is below the number of points.
#pragma once

#include <cstdint>

namespace conclave::inline v0::quant {

const int8_t* grid_iq1(int index) noexcept;      // 2048 points of -1, 0 and 1
const int8_t* grid_iq2_xxs(int index) noexcept;  // 256
const int8_t* grid_iq2_xs(int index) noexcept;   // 512
const int8_t* grid_iq2_s(int index) noexcept;    // 1024
const int8_t* grid_iq3_xxs(int index) noexcept;  // 256
const int8_t* grid_iq3_s(int index) noexcept;    // 512

}  // namespace conclave::inline v0::quant
