// Interleaved weights of some k of a panel, shared by many rows.
#pragma once

#include "gemm/cpu/integer_kernel-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// The k of a strip, and whether a segment begins with it.
struct StripRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool begins = false;
};

// 256 k in the first-level cache, in the order of quads' lanes, slice after slice.
template <class Weights>
struct QuadStrip {
  static constexpr int64_t kK = 256;

  alignas(64) int32_t quads[kK / 4][64];

  // The quads from `from` to `to`, multiples of 4, at most kK of them; weights of a k outside
  // [begin, end) are zero. One of them at least is inside.
  CONCLAVE_KERNEL_INLINE void fill(const PanelTask& task, int64_t from, int64_t to, int64_t begin,
                                   int64_t end, Ahead& ahead) {
    for (int64_t k = from; k < to; k += 4) {
      if ((k - from) % (4 * kQuadsPerTurn) == 0) ahead.turn();
      int32_t* const out = quads[(k - from) / 4];
#pragma GCC unroll 2
      for (int slice = 0; slice < Quads::kSlices; ++slice) {
        store(load(task.panel + k * Weights::kRowBytes, begin - k, end - k, slice),
              out + slice * kSliceColumns);
      }
    }
  }

 private:
  // Four rows, of which only those in [begin, end) count.
  static CONCLAVE_KERNEL_INLINE Quads load(const std::byte* codes, int64_t begin, int64_t end,
                                           int slice) {
    if (begin <= 0 && end >= 4) return load_quads<Weights>(codes, slice);
    if (begin >= 4 || end <= 0) return {};
    return load_some_quads<Weights>(codes, begin > 0 ? begin : 0, end < 4 ? end : 4, slice);
  }
  static CONCLAVE_KERNEL_INLINE void store(const Quads& from, int32_t* out) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) from.value[j].store(out + j * Vec::kLanes);
  }
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
