// Rows of int8 codes times one packed panel of codes whose values are whole numbers, for 16 vector
// registers of 8 lanes: the arithmetic and the bits of integer_kernel-inl.h, which few rows take.
//
// So few registers hold the sums of two rows beside 32 interleaved columns. Those of six fit beside
// 16 columns from a strip, which pays from six rows on.
#pragma once

#include "gemm/cpu/integer_strips-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// A multiplier of StripRows.
template <class Weights>
class VectorMultiplier {
 public:
  static constexpr int kRows = kStripTileRows;
  static constexpr int64_t kStepK = 4;

  template <class Strip>
  CONCLAVE_KERNEL_INLINE void add_strip(const PanelTask& /*task*/, const Strip& strip,
                                        const StripRange& range, IntegerGroup<kRows>& group) {
    with_rows<kRows>(group.num_rows, AddStrip<Strip>{strip, range, group});
  }

 private:
  template <class Strip>
  struct AddStrip {
    const Strip& strip;
    const StripRange& range;
    IntegerGroup<kRows>& group;

    template <int kCount>
    CONCLAVE_KERNEL_INLINE void call() const {
      for (int column = 0; column < 64; column += 2 * Vec::kLanes) {
        add_columns<kCount>(&strip.quads[0][column], range, column, group);
      }
    }
  };

  // 16 columns of a strip.
  template <int kCount>
  static CONCLAVE_KERNEL_INLINE void add_columns(const int32_t* quads, const StripRange& range,
                                                 int column, IntegerGroup<kRows>& group) {
    Ints sum[kCount][2];
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        sum[r][j] = range.begins ? Ints::broadcast(0)
                                 : Ints::load(group.partial[r] + column + j * Vec::kLanes);
      }
    }
    for (int64_t k = range.begin; k < range.end; k += 4, quads += 64) {
      const Ints first = Ints::load(quads);
      const Ints second = Ints::load(quads + Vec::kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kCount; ++r) {
        const Ints codes = broadcast_codes(group.codes[r] + k);
        sum[r][0].template add_products<Weights>(first, codes);
        sum[r][1].template add_products<Weights>(second, codes);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) sum[r][j].store(group.partial[r] + column + j * Vec::kLanes);
    }
  }
};

// A PanelFunction for rows of codes.
template <class Format>
struct IntegerPanelByStrips {
  static void compute(const PanelTask& task) noexcept {
    if (task.num_rows < kStripTileRows) return IntegerPanel<Format>::compute(task);
    VectorMultiplier<WholeWeights<Format>> multiplier;
    compute_by_strips<WholeWeights<Format>>(task, multiplier);
  }
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
