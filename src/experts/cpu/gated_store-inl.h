// The epilogue of the gate_up product: activation(gate, up) of the 32 columns of a panel.
#pragma once

#include "gemm/cpu/micro_kernel-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

struct AsF32 {
  static constexpr int kBytes = 4;
  static CONCLAVE_KERNEL_INLINE void store(Vec value, std::byte* out) { value.store(out); }
};

#if !defined(CONCLAVE_SIMD_AVX2)
struct AsBf16 {
  static constexpr int kBytes = 2;
  static CONCLAVE_KERNEL_INLINE void store(Vec value, std::byte* out) { value.store_bf16(out); }
};
#endif

// Columns that do not exist become zeros: left as computed, an infinite activation times their
// zero weights would put a NaN into the next product.
template <class Formula, class Format>
struct GatedStore {
  template <int kRows, int kVectors>
  static CONCLAVE_KERNEL_INLINE void store(const Tile<kRows, kVectors>& tile, const PanelTask& task,
                                           int64_t first_row, int pass) {
    constexpr int kHalf = kVectors / 2;
    for (int r = 0; r < kRows; ++r) {
      std::byte* out = task.out + (first_row + r) * task.out_row_bytes;
#pragma GCC unroll 8
      for (int j = 0; j < kHalf; ++j) {
        const int column = column_of<kVectors>(pass, j);
        Vec value = Formula::apply(tile.sum[r][j], tile.sum[r][j + kHalf]);
        const int64_t valid = task.valid_columns - column;
        if (valid < Vec::kLanes) value = value.keep_first(valid > 0 ? valid : 0);
        Format::store(value, out + column * Format::kBytes);
      }
    }
  }
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
