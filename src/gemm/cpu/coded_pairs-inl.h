// Plain rows of bf16 times one packed panel of codes with scales, by dot products of pairs, for
// formats whose values are exact in bf16: only the rows were rounded. All rows share decoded
// strips.
#pragma once

#include "gemm/cpu/coded_kernel-inl.h"
#include "quant/code_values.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Codes as pairs of bf16, for plain rows of bf16.
template <class Format>
struct PairedCodes : Bf16DotWeights {
  static_assert(quant::exact_in_bf16<Format>());
  using Codes = PanelCodes<Format>;
  using Lane = uint32_t;

  static CONCLAVE_KERNEL_INLINE bool with_scales(const PanelTask& /*task*/) { return false; }
  template <class Rows>
  static CONCLAVE_KERNEL_INLINE Vec row_scale(const PanelTask& /*task*/, const Rows& /*rows*/,
                                              int /*r*/, int64_t /*k*/) {
    return Vec::broadcast(1.0F);
  }
  // A strip that ends in the middle of a pair has a zero there: the row's next value is not its
  // own.
  static CONCLAVE_KERNEL_INLINE void decode(const PanelTask& task, Ahead& ahead,
                                            Strip<PairedCodes>& strip) {
    constexpr int kVectors = 64 / Vec::kLanes;
    const std::byte* codes = task.panel + strip.begin * Codes::kRowBytes;
    const int64_t length = strip.end - strip.begin;
    for (int64_t k = 0; k < length; k += 2, codes += 2 * Codes::kRowBytes) {
      if (k % kCodesPerTurn == 0) ahead.turn();
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) {
        const Vec first = Codes::template load<kVectors>(codes, 0, j);
        const Vec second = k + 1 < length
                               ? Codes::template load<kVectors>(codes + Codes::kRowBytes, 0, j)
                               : Vec::zero();
        Vec::pair_bf16(first, second).store(strip.weights[k / 2] + column_of<kVectors>(0, j));
      }
    }
  }
};

// A PanelFunction for plain rows of bf16.
template <class Format>
void compute_paired_panel(const PanelTask& task) noexcept {
  if (task.num_rows == 0) return;
  Ahead ahead = fetch_codes<PairedCodes<Format>>(task);
  compute_blocks<PairedCodes<Format>>(task, ahead);
}

template <class Format>
constexpr PanelFunction paired_product_of() noexcept {
  if constexpr (quant::exact_in_bf16<Format>()) return &compute_paired_panel<Format>;
  return nullptr;
}

// The product for weights of one of the formats; null if there is none for them.
template <class... Formats>
PanelFunction paired_product(DType weights, quant::FormatList<Formats...>) noexcept {
  PanelFunction product = nullptr;
  ((weights == Formats::kElement ? void(product = paired_product_of<Formats>()) : void()), ...);
  return product;
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
