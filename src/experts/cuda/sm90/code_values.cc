#include "experts/cuda/sm90/code_values.h"

#include "core/float_convert.h"
#include "core/weight_types.h"
#include "quant/weight_format.h"

#include <cmath>
#include <cstddef>

namespace conclave::inline v0::experts {

void fill_bf16_values(DType dtype, uint32_t (&values)[256]) {
  const quant::WeightFormat& format = quant::format_of(dtype);
  const int codes = 1 << bit_size(dtype);
  for (int code = 0; code < codes; ++code) {
    const auto row = static_cast<std::byte>(code);
    float value = 0;
    format.decode(&row, 0, 1, &value);
    const uint16_t first = float_to_bf16(value);
    // Infinity and NaN leave nothing.
    const float rest = std::isfinite(value) ? value - bf16_to_float(first) : 0.0F;
    values[code] = first | uint32_t{float_to_bf16(rest)} << 16;
  }
}

}  // namespace conclave::inline v0::experts
