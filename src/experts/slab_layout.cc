#include "experts/slab_layout.h"

#include <algorithm>

namespace conclave::inline v0::experts {
namespace {

const std::byte* matrix_row(const ConstTensorView& matrix, int64_t row) {
  const int64_t stride = matrix.row_stride != 0 ? matrix.row_stride : matrix.shape[1];
  return static_cast<const std::byte*>(matrix.data) + row * stride * byte_size(matrix.dtype);
}

// Rows [first, first + limit) of the matrix, as far as they exist, become columns of the panel.
void take_rows(const ConstTensorView& matrix, int64_t first, int64_t limit,
               gemm::PanelColumns& columns, int64_t first_column) {
  const int64_t count = std::min(limit, matrix.shape[0] - first);
  for (int64_t i = 0; i < count; ++i) {
    columns[static_cast<size_t>(first_column + i)] = matrix_row(matrix, first + i);
  }
}

}  // namespace

SlabLayout::SlabLayout(const ExpertsProblem& problem)
    : hidden_size(problem.hidden_size),
      intermediate_size(problem.intermediate_size),
      gate_up{.dtype = problem.weight_dtype, .k = problem.hidden_size},
      down{.dtype = problem.weight_dtype, .k = problem.intermediate_size} {}

SlabBytes SlabLayout::bytes() const {
  return {.gate_up = static_cast<size_t>(gate_up_panels()) * gate_up.panel_bytes(),
          .down = static_cast<size_t>(down_panels()) * down.panel_bytes()};
}

void SlabLayout::pack(const ExpertMatrices& expert, std::byte* gate_up_slab,
                      std::byte* down_slab) const {
  for (int64_t panel = 0; panel < gate_up_panels(); ++panel) {
    gemm::PanelColumns columns{};
    take_rows(expert.gate, panel * kGateUpColumns, kGateUpColumns, columns, 0);
    take_rows(expert.up, panel * kGateUpColumns, kGateUpColumns, columns, kGateUpColumns);
    gemm::pack_panel(gate_up, columns,
                     gate_up_slab + static_cast<size_t>(panel) * gate_up.panel_bytes());
  }
  for (int64_t panel = 0; panel < down_panels(); ++panel) {
    gemm::PanelColumns columns{};
    take_rows(expert.down, panel * gemm::kPanelColumns, gemm::kPanelColumns, columns, 0);
    gemm::pack_panel(down, columns, down_slab + static_cast<size_t>(panel) * down.panel_bytes());
  }
}

}  // namespace conclave::inline v0::experts
