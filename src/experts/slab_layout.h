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

// Says where the parts of a slab lie; slabs that are null have null parts. A layout's sizes take
// divisions, which one panel's product with a few rows would notice: kernels keep the places.
struct SlabPlaces {
  static constexpr size_t kNone = SIZE_MAX;

  size_t slab_bytes = 0;
  size_t stride = 0;      // bytes from one panel to the next
  size_t biases = kNone;  // from a panel's first byte
  // From the slab's.
  size_t lower_order = kNone;
  size_t upper_order = kNone;
  size_t factors = kNone;

  const std::byte* slab(const Slabs& slabs, int64_t expert) const {
    if (slabs.each != nullptr) return slabs.each[expert];
    return slabs.first == nullptr ? nullptr
                                  : slabs.first + static_cast<size_t>(expert) * slab_bytes;
  }
  const std::byte* panel(const std::byte* slab, int64_t index) const {
    return slab == nullptr ? nullptr : slab + static_cast<size_t>(index) * stride;
  }
  // Null if there are none.
  template <class T>
  static const T* at(const std::byte* base, size_t place) {
    if (place == kNone) return nullptr;
    return static_cast<const T*>(static_cast<const void*>(base + place));
  }
  gemm::PanelOrder order(const std::byte* slab) const {
    return {.lower = at<int32_t>(slab, lower_order), .upper = at<int32_t>(slab, upper_order)};
  }
};

// A panel to be made of an expert that lies elsewhere, and the one after it, if that is known.
struct PanelInPlace {
  const ExpertMatrices& expert;
  int64_t index = 0;
  const ExpertMatrices* next_expert = nullptr;
  int64_t next_index = 0;
};

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
  SlabBytes bytes() const {
    return {.gate_up = gate_up_places().slab_bytes, .down = down_places().slab_bytes};
  }
  PackGranule granule() const {
    return {.inner_rows = gate_up_columns(),
            .hidden_rows = gemm::kPanelColumns,
            .gate_up_bytes = stride(gate_up),
            .down_bytes = stride(down)};
  }
  std::string name() const;  // "panel64.k2.v1"; "panel64.k2.single.bias.v1" without gate, with bias

  // Vector code makes it faster.
  void pack(const ExpertMatrices& expert, std::byte* gate_up_slab, std::byte* down_slab,
            const gemm::PackFunctions& functions = {}) const;
  // Make one panel of weights that are values, with its biases: the bytes that `pack` writes for
  // it.
  void make_gate_up_panel(const PanelInPlace& panel, gemm::TransposeFunction transpose,
                          std::byte* to) const noexcept;
  void make_down_panel(const PanelInPlace& panel, gemm::TransposeFunction transpose,
                       std::byte* to) const noexcept;
  // Bytes for either, a multiple of 64.
  size_t panel_room() const;
  SlabPlaces gate_up_places() const { return places(gate_up, gate_up_panels(), gated ? 2 : 1); }
  SlabPlaces down_places() const { return places(down, down_panels(), 1); }

 private:
  static constexpr size_t kBiasBytes = static_cast<size_t>(gemm::kPanelColumns) * sizeof(float);

  SlabPlaces places(const gemm::PanelLayout& panel, int64_t num_panels, size_t num_orders) const;
};

}  // namespace conclave::inline v0::experts
