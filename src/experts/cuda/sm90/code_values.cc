#include "experts/cuda/sm90/code_values.h"

#include "core/float_convert.h"
#include "core/weight_types.h"
#include "quant/weight_format.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace conclave::inline v0::experts {

Bf16Values bf16_values(DType dtype) {
  const quant::WeightFormat& format = quant::format_of(dtype);
  const auto multiplier = static_cast<float>(std::max(format.codes->bf16_multiplier, 1));
  Bf16Values values{.unit = 1 / multiplier};
  const int codes = 1 << bit_size(dtype);
  for (int code = 0; code < codes; ++code) {
    const auto row = static_cast<std::byte>(code);
    float value = 0;
    format.decode(&row, 0, 1, &value);
    value *= multiplier;
    const uint16_t first = float_to_bf16(value);
    // Infinity and NaN leave nothing.
    const float rest = std::isfinite(value) ? value - bf16_to_float(first) : 0.0F;
    values.of[code] = first | uint32_t{float_to_bf16(rest)} << 16;
  }
  return values;
}

bool takes_two_terms(DType dtype) { return quant::format_of(dtype).codes->bf16_multiplier == 0; }

}  // namespace conclave::inline v0::experts
