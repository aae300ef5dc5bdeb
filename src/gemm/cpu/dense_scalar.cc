#include "gemm/cpu/dense_kernels.h"
#include "gemm/reference_product.h"

namespace conclave::inline v0::gemm {
namespace {

template <DType kWeights>
void compute_panel(const PanelTask& task) noexcept {
  const PanelLayout layout{.dtype = kWeights, .k = task.k};
  for (int64_t r = 0; r < task.num_rows; ++r) {
    const int64_t row = task.row_index != nullptr ? task.row_index[r] : r;
    const auto* x =
        static_cast<const float*>(static_cast<const void*>(task.rows + row * task.row_bytes));
    auto* out = static_cast<float*>(static_cast<void*>(task.out + r * task.out_row_bytes));
    reference_product(layout, task.panel, x, 0, task.valid_columns, out);
    if (task.bias == nullptr) continue;
    for (int64_t c = 0; c < task.valid_columns; ++c) out[c] += task.bias[c];
  }
}

}  // namespace

PanelFunction dense_panel_scalar(DType weights) noexcept {
  switch (weights) {
    case DType::kF32:
      return &compute_panel<DType::kF32>;
    case DType::kF16:
      return &compute_panel<DType::kF16>;
    default:
      return &compute_panel<DType::kBF16>;
  }
}

}  // namespace conclave::inline v0::gemm
