#include "gemm/reference_product.h"

#include <cmath>

namespace conclave::inline v0::gemm {

void reference_product(const PanelLayout& layout, const std::byte* panel, const float* x,
                       int64_t first_column, int64_t num_columns, float* out) noexcept {
  const int64_t padded = round_up(layout.k, layout.group());
  for (int64_t i = 0; i < num_columns; ++i) {
    float sum = 0.0F;
    for (int64_t k = 0; k < padded; ++k) {
      sum = std::fma(x[k], panel_value(layout, panel, k, first_column + i), sum);
    }
    out[i] = sum;
  }
}

}  // namespace conclave::inline v0::gemm
