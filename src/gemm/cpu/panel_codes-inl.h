// Codes of a packed panel, widened one by one.
#pragma once

#include "gemm/cpu/simd-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// A panel's row of codes, as vectors of what they stand for.
template <class Format>
struct PanelCodes {
  static constexpr int64_t kRowBytes = Format::kBits * 8;

  // Vector `j` of `kVectors` in a pass over the panel, at column_of(pass, j).
  template <int kVectors>
  static CONCLAVE_KERNEL_INLINE Vec load(const std::byte* row, int pass, int j) {
    constexpr int kHalf = kVectors / 2;
    const int column = (pass * kHalf + j % kHalf) * Vec::kLanes;
    return j < kHalf ? Format::template lanes<Vec, false>(row, column)
                     : Format::template lanes<Vec, true>(row, column);
  }
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
