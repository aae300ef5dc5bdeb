// One expert's matrices as two slabs of "panel64" panels (gemm/packed_layout.h).
//
// gate_up: panels of 32 gate columns and the 32 up columns of the same intermediate positions, so
// that a register tile holds both. down: panels of 64 hidden columns. Columns and k beyond the
// matrix are zeros.
#pragma once

#include "experts/experts_kernel.h"
#include "gemm/packed_layout.h"

namespace conclave::inline v0::experts {

inline constexpr int64_t kGateUpColumns = gemm::kPanelColumns / 2;

struct SlabLayout {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  gemm::PanelLayout gate_up;  // k = hidden_size
  gemm::PanelLayout down;     // k = intermediate_size

  explicit SlabLayout(const ExpertsProblem& problem);

  int64_t gate_up_panels() const { return ceil_div(intermediate_size, kGateUpColumns); }
  int64_t down_panels() const { return ceil_div(hidden_size, gemm::kPanelColumns); }
  // Of an activated row: the columns of all gate_up panels.
  int64_t padded_intermediate() const { return gate_up_panels() * kGateUpColumns; }
  SlabBytes bytes() const;

  void pack(const ExpertMatrices& expert, std::byte* gate_up_slab, std::byte* down_slab) const;
};

}  // namespace conclave::inline v0::experts
