// One expert's matrices as two slabs of "panel64" panels (gemm/packed_layout.h).
//
// gate_up: with a gate, panels of 32 gate columns and the 32 up columns of the same intermediate
// positions, so that a register tile holds both; without one, panels of 64 up columns. down: panels
// of 64 hidden columns. Columns and k beyond the matrix are zeros. Panels of codes end with their
// scales, and offsets if there are. With biases, each panel is followed by those of its 64 columns
// as float32. Orders of columns, int32 [k], end the slab: one of down; of gate, then of up. After
// them come factors of columns, float32 [k].
#pragma once

#include "experts/kernel.h"
#include "experts/problem.h"
#include "gemm/packed_layout.h"
#include "gemm/panel_order.h"

namespace conclave::inline v0::experts {

struct SlabLayout {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  bool gated = true;
  bool has_bias = false;
  bool has_factors = false;
  gemm::PanelLayout gate_up;  // k = hidden_size
  gemm::PanelLayout down;     // k = intermediate_size

  explicit SlabLayout(const ExpertsProblem& problem);

  // Activated columns that a gate_up panel yields.
  int64_t gate_up_columns() const { return gated ? gemm::kPanelColumns / 2 : gemm::kPanelColumns; }
  int64_t gate_up_panels() const { return ceil_div(intermediate_size, gate_up_columns()); }
  int64_t down_panels() const { return ceil_div(hidden_size, gemm::kPanelColumns); }
  // Padded width of an activated row: the columns of all gate_up panels.
  int64_t padded_intermediate() const { return gate_up_panels() * gate_up_columns(); }
  // Bytes from one panel to the next.
  size_t stride(const gemm::PanelLayout& panel) const {
    return panel.panel_bytes() + (has_bias ? kBiasBytes : 0);
  }
  SlabBytes bytes() const;
  PackGranule granule() const {
    return {.inner_rows = gate_up_columns(),
            .hidden_rows = gemm::kPanelColumns,
            .gate_up_bytes = stride(gate_up),
            .down_bytes = stride(down)};
  }
  std::string name() const;  // "panel64.k2.v1"; "panel64.k2.single.bias.v1" without gate, with bias

  void pack(const ExpertMatrices& expert, std::byte* gate_up_slab, std::byte* down_slab) const;
  // The biases of a panel of either slab; null if there are none.
  const float* bias(const gemm::PanelLayout& layout, const std::byte* panel) const {
    if (!has_bias) return nullptr;
    return static_cast<const float*>(static_cast<const void*>(panel + layout.panel_bytes()));
  }
  // The orders of columns of a slab, if there are.
  gemm::PanelOrder gate_up_order(const std::byte* slab) const;
  gemm::PanelOrder down_order(const std::byte* slab) const;
  // The factors of columns of a slab; null if there are none.
  const float* gate_up_factors(const std::byte* slab) const;
  const float* down_factors(const std::byte* slab) const;

 private:
  static constexpr size_t kBiasBytes = static_cast<size_t>(gemm::kPanelColumns) * sizeof(float);

  // Bytes of the panels of a slab, which its orders follow.
  size_t gate_up_panel_bytes() const {
    return static_cast<size_t>(gate_up_panels()) * stride(gate_up);
  }
  size_t down_panel_bytes() const { return static_cast<size_t>(down_panels()) * stride(down); }
  // Where factors begin, behind panels and orders.
  size_t gate_up_factor_offset() const;
  size_t down_factor_offset() const;
  void pack_tables(const ExpertMatrices& expert, std::byte* gate_up_slab,
                   std::byte* down_slab) const;
};

}  // namespace conclave::inline v0::experts
