// The epilogue of the gate_up product: activated rows from finished sums.
#pragma once

#include "activation/formulas.h"
#include "gemm/cpu/panel_task.h"
#include "gemm/cpu/simd-inl.h"

#include "conclave/dtype.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

struct AsF32 {
  static constexpr int kBytes = 4;
  static CONCLAVE_KERNEL_INLINE void store(Vec value, std::byte* out) { value.store(out); }
};

// Not for vectors of 8 lanes, which have no such store.
struct AsBf16 {
  static constexpr int kBytes = 2;
  template <class Vector>
  static CONCLAVE_KERNEL_INLINE void store(Vector value, std::byte* out) {
    value.store_bf16(out);
  }
};

// Output columns that do not exist become zeros: an infinite activation left there, times its zero
// weights, would put a NaN into the next product.
template <class Formula, class Format>
void activate_tile(const PanelTask& task, const FinishedTile& tile) noexcept {
  constexpr int64_t kColumns = Formula::kGated ? 32 : 64;
  const auto parameters =
      *static_cast<const activation::FormulaParameters*>(task.epilogue_parameters);
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    const float* sums = tile.sums + r * 64;
    std::byte* row = tile.out + r * tile.out_row_bytes;
    for (int64_t c = 0; c < kColumns; c += Vec::kLanes) {
      const Vec up = Vec::load(sums + c + (64 - kColumns));
      Vec value = Formula::apply(Vec::load(sums + c), up, parameters);
      const int64_t valid = task.valid_columns - c;
      if (valid < Vec::kLanes) value = value.keep_first(valid > 0 ? valid : 0);
      Format::store(value, row + c / 32 * tile.out_block_bytes + c % 32 * Format::kBytes);
    }
  }
}

template <class Format>
struct ChooseActivate {
  template <class Formula>
  EpilogueFunction visit() const {
    return &activate_tile<Formula, Format>;
  }
};

template <class Format>
EpilogueFunction choose_activate(const activation::Activation& activation) noexcept {
  return activation::with_formula(activation, ChooseActivate<Format>{});
}

// For activated rows of kBF16 or kF32; a template, since vectors of 8 lanes have no AsBf16.
template <class Narrow = AsBf16>
EpilogueFunction choose_activate(const activation::Activation& activation,
                                 DType activated) noexcept {
  return activated == DType::kBF16 ? choose_activate<Narrow>(activation)
                                   : choose_activate<AsF32>(activation);
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
