// Rows times one packed panel of codes with scales: reference_coded_product in vectors. Lanes are
// columns of the panel, so that each keeps the order of its sum.
//
// Few rows decode a code when they need it. More rows share a strip of decoded weights, which costs
// a store and lets the loop over k be that of plain weights. For rows of bf16: coded_pairs-inl.h.
#pragma once

#include "gemm/cpu/ahead-inl.h"
#include "gemm/cpu/finish-inl.h"
#include "gemm/cpu/group_numbers-inl.h"
#include "gemm/cpu/micro_kernel-inl.h"
#include "gemm/cpu/panel_codes-inl.h"
#include "gemm/cpu/segments-inl.h"
#include "gemm/cpu/weights-inl.h"
#include "quant/formats.h"

#include "conclave/dtype.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Rows that decode for themselves: more would not leave the registers that decoding takes.
inline constexpr int kMaxDirectRows = kMostNarrowRows;
template <int kRows>
inline constexpr int kDirectVectors = Vec::kLanes == 16 ? 4
                                      : kRows <= 2      ? 4
                                                        : 2;

// Decoded weights: 32 KiB in the first- or second-level cache.
inline constexpr int64_t kStripK = 128;
// Rows that share a strip, and whose sums lie beside it; no block of a work list has more.
inline constexpr int64_t kMaxStripRows = 96;
// Values of k between two turns of fetching the next panel.
inline constexpr int64_t kCodesPerTurn = 16;

// total + partial * row_scale * scale, as the reference rounds it.
CONCLAVE_KERNEL_INLINE Vec add_scaled(Vec total, Vec partial, Vec row_scale, const float* scale) {
  return Vec::add(total, Vec::mul(Vec::mul(partial, row_scale), Vec::load(scale)));
}

template <int kRows, class Activation = float>
struct RowPointers {
  const Activation* values[kRows];
  const float* scales[kRows];  // null for plain rows

  CONCLAVE_KERNEL_INLINE RowPointers(const PanelTask& task, int64_t first_row) {
    for (int r = 0; r < kRows; ++r) {
      const int64_t slot = first_row + r;
      const int64_t row = task.row_index != nullptr ? task.row_index[slot] : slot;
      values[r] = reinterpret_cast<const Activation*>(task.rows + row * task.row_bytes);
      scales[r] =
          task.row_scales.first == nullptr ? nullptr : task.row_scales.of_row(row, task.row_bytes);
    }
  }
};

// Rows are multiplied with one of these.
enum class Decoded {
  kCodes,    // codes: rows have scales too
  kScaled,   // code * scale: plain rows
  kShifted,  // code * scale - offset: plain rows
};

// Adds k of [begin, end), which share their scales, to the sums of one pass.
template <class Format, int kRows, Decoded kDecoded>
CONCLAVE_KERNEL_INLINE void add_segment(const PanelTask& task, const RowPointers<kRows>& rows,
                                        int64_t begin, int64_t end, int pass, Ahead& ahead,
                                        float (&sums)[kRows][64]) {
  constexpr int kVectors = kDirectVectors<kRows>;
  constexpr bool kPlain = kDecoded != Decoded::kCodes;
  using Codes = PanelCodes<Format>;
  alignas(64) float room[2][64];
  const int64_t group = scale_group(task, begin);
  const float* scales = numbers_of(task.scales, group, room[0]);
  const float* offsets =
      kDecoded == Decoded::kShifted ? numbers_of(task.offsets, group, room[1]) : nullptr;
  const std::byte* codes = task.panel + begin * Codes::kRowBytes;
  Tile<kRows, kVectors> tile;
  tile.clear();
  if constexpr (kPlain) {
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) {
        tile.sum[r][j] = Vec::load(sums[r] + column_of<kVectors>(pass, j));
      }
    }
  }
  for (int64_t turn = begin; turn < end; turn += kCodesPerTurn) {
    if (pass == 0) ahead.turn();
    const int64_t stop = lesser(end, turn + kCodesPerTurn);
    for (int64_t k = turn; k < stop; ++k, codes += Codes::kRowBytes) {
      // Left to itself GCC inlines this too late to keep the sums in registers.
      tile.multiply_add_with(
          rows.values, k, [&](int j) __attribute__((always_inline)) {
            const Vec weight = Codes::template load<kVectors>(codes, pass, j);
            const int c = column_of<kVectors>(pass, j);
            if constexpr (kDecoded == Decoded::kCodes) return weight;
            const Vec scale = Vec::load(scales + c);
            if constexpr (kDecoded == Decoded::kScaled) return Vec::mul(weight, scale);
            return Vec::fms(weight, scale, Vec::load(offsets + c));
          });
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const Vec row_scale =
        kPlain ? Vec::zero() : Vec::broadcast(rows.scales[r][begin / task.row_scales.width]);
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      const int column = column_of<kVectors>(pass, j);
      float* const sum = sums[r] + column;
      const Vec part = tile.sum[r][j];
      (kPlain ? part : add_scaled(Vec::load(sum), part, row_scale, scales + column)).store(sum);
    }
  }
}

// Computes all rows of a task that has few.
template <class Format, int kRows, Decoded kDecoded>
void compute_direct_tile(const PanelTask& task, Ahead& ahead) {
  constexpr int kPasses = 64 / (kDirectVectors<kRows> * Vec::kLanes);
  const RowPointers<kRows> rows(task, 0);
  alignas(64) float sums[kRows][64] = {};
  for (int pass = 0; pass < kPasses; ++pass) {
    for (int64_t begin = 0, end = 0; begin < task.k; begin = end) {
      end = segment_end(task, begin);
      add_segment<Format, kRows, kDecoded>(task, rows, begin, end, pass, ahead, sums);
    }
  }
  finish_tile(task, {.sums = sums[0],
                     .num_rows = kRows,
                     .out = task.out,
                     .out_row_bytes = task.out_row_bytes,
                     .out_block_bytes = task.out_block_bytes});
}

// Some rows' sums, beside the decoded weights of k in [begin, end). A partial sum covers what
// shares its scales; where weights are multiplied with theirs, there is one, over all of k.
template <class Weights>
struct Strip {
  alignas(64) typename Weights::Lane weights[kStripK / Weights::kStepK][64];
  alignas(64) float partial[kMaxStripRows][64];
  alignas(64) float total[kMaxStripRows][64];
  int64_t begin = 0;
  int64_t end = 0;
  bool begins_partial = false;
  bool ends_partial = false;
};

// Codes as float32, for rows of float32: times their scales where rows are plain.
template <class Format>
struct WidenedCodes : F32Weights {
  using Codes = PanelCodes<Format>;
  using Lane = float;

  static CONCLAVE_KERNEL_INLINE bool with_scales(const PanelTask& task) {
    return task.row_scales.first == nullptr;
  }
  template <class Rows>
  static CONCLAVE_KERNEL_INLINE Vec row_scale(const PanelTask& task, const Rows& rows, int r,
                                              int64_t k) {
    return with_scales(task) ? Vec::zero()
                             : Vec::broadcast(rows.scales[r][k / task.row_scales.width]);
  }
  static CONCLAVE_KERNEL_INLINE void decode(const PanelTask& task, Ahead& ahead,
                                            Strip<WidenedCodes>& strip) {
    if (!with_scales(task)) return decode_rows<Decoded::kCodes>(task, ahead, strip);
    if (!task.offsets.exist()) return decode_rows<Decoded::kScaled>(task, ahead, strip);
    return decode_rows<Decoded::kShifted>(task, ahead, strip);
  }

 private:
  template <Decoded kDecoded>
  static CONCLAVE_KERNEL_INLINE void decode_rows(const PanelTask& task, Ahead& ahead,
                                                 Strip<WidenedCodes>& strip) {
    constexpr int kVectors = 64 / Vec::kLanes;
    const bool ordered = task.order.lower != nullptr;
    int64_t lower = ordered ? 0 : scale_index(task, strip.begin);
    int64_t upper = lower;
    const std::byte* codes = task.panel + strip.begin * Codes::kRowBytes;
    for (int64_t k = 0; k < strip.end - strip.begin; ++k, codes += Codes::kRowBytes) {
      if (k % kCodesPerTurn == 0) ahead.turn();
      if (ordered) {
        lower = int64_t{task.order.lower[strip.begin + k]} * 64;
        upper = int64_t{task.order.upper[strip.begin + k]} * 64;
      }
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) {
        Vec weight = Codes::template load<kVectors>(codes, 0, j);
        const int c = column_of<kVectors>(0, j);
        const int64_t at = (j < kVectors / 2 ? lower : upper) + c;
        if constexpr (kDecoded == Decoded::kScaled) {
          weight = Vec::mul(weight, Vec::load(task.scales.floats + at));
        } else if constexpr (kDecoded == Decoded::kShifted) {
          weight = Vec::fms(weight, Vec::load(task.scales.floats + at),
                            Vec::load(task.offsets.floats + at));
        }
        weight.store(strip.weights[k] + c);
      }
    }
  }
};

// Rows first_row + [0, kRows) of the task; `row` is the first one's place in the strip.
template <class Weights, int kRows>
void add_strip_tile(const PanelTask& task, int64_t first_row, int64_t row, Strip<Weights>& strip) {
  constexpr int kVectors = kTileVectors<kRows>;
  constexpr int kPasses = 64 / (kVectors * Vec::kLanes);
  const RowPointers<kRows, typename Weights::Activation> rows(task, first_row);
  const bool plain = Weights::with_scales(task);
  const float* scales = task.scales.floats + (plain ? 0 : scale_index(task, strip.begin));
  for (int pass = 0; pass < kPasses; ++pass) {
    Tile<kRows, kVectors> tile;
    tile.clear();
    if (!strip.begins_partial) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) {
          tile.sum[r][j] = Vec::load(strip.partial[row + r] + column_of<kVectors>(pass, j));
        }
      }
    }
    const auto* weights = reinterpret_cast<const std::byte*>(strip.weights[0]);
    for (int64_t k = strip.begin; k < strip.end; k += Weights::kStepK, weights += 64 * 4) {
      Weights::template step<kRows, kVectors>(tile, rows.values, k, weights, pass);
    }
    // Left rolled up, this loop keeps the sums in memory, also while they are added to.
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec row_scale = Weights::row_scale(task, rows, r, strip.begin);
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) {
        const int column = column_of<kVectors>(pass, j);
        const Vec sum = tile.sum[r][j];
        float* const total = strip.total[row + r] + column;
        if (!strip.ends_partial) {
          sum.store(strip.partial[row + r] + column);
        } else if (plain) {
          sum.store(total);
        } else {
          add_scaled(Vec::load(total), sum, row_scale, scales + column).store(total);
        }
      }
    }
  }
}

template <class Weights>
struct AddStripTile {
  const PanelTask& task;
  int64_t first_row;
  int64_t row;
  Strip<Weights>& strip;

  template <int kRows>
  CONCLAVE_KERNEL_INLINE void call() const {
    add_strip_tile<Weights, kRows>(task, first_row, row, strip);
  }
};

// Rows [first, first + count), at most kMaxStripRows.
template <class Weights>
void compute_by_strips(const PanelTask& task, int64_t first, int64_t count, Ahead& ahead) {
  const bool plain = Weights::with_scales(task);
  Strip<Weights> strip;
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t c = 0; c < 64; c += Vec::kLanes) Vec::zero().store(strip.total[r] + c);
  }
  const int64_t tiles = (count + kMaxTileRows - 1) / kMaxTileRows;
  for (int64_t segment = 0; segment < task.k;) {
    const int64_t end = segment_end(task, segment);
    for (strip.begin = segment; strip.begin < end; strip.begin = strip.end) {
      strip.end = lesser(end, strip.begin + kStripK);
      strip.begins_partial = strip.begin == (plain ? 0 : segment);
      strip.ends_partial = strip.end == (plain ? task.k : end);
      Weights::decode(task, ahead, strip);
      for (int64_t t = 0, row = 0; t < tiles; ++t) {
        const int64_t rows = count / tiles + (t < count % tiles ? 1 : 0);
        call_for<kMaxTileRows>(rows, AddStripTile<Weights>{task, first + row, row, strip});
        row += rows;
      }
    }
    segment = end;
  }
  finish_tile(task, {.sums = strip.total[0],
                     .first_row = first,
                     .num_rows = count,
                     .out = task.out + first * task.out_row_bytes,
                     .out_row_bytes = task.out_row_bytes,
                     .out_block_bytes = task.out_block_bytes});
}

template <class Format>
struct ComputeDirectTile {
  const PanelTask& task;
  Ahead& ahead;

  template <int kRows>
  CONCLAVE_KERNEL_INLINE void call() const {
    if (task.row_scales.first != nullptr) {
      compute_direct_tile<Format, kRows, Decoded::kCodes>(task, ahead);
    } else if (!task.offsets.exist()) {
      compute_direct_tile<Format, kRows, Decoded::kScaled>(task, ahead);
    } else {
      compute_direct_tile<Format, kRows, Decoded::kShifted>(task, ahead);
    }
  }
};

CONCLAVE_KERNEL_INLINE Ahead fetch_codes(const PanelTask& task) {
  const int64_t blocks = (task.num_rows + kMaxStripRows - 1) / kMaxStripRows;
  const int64_t turns = (task.k + kCodesPerTurn - 1) / kCodesPerTurn;
  return Ahead::during(blocks, task.panel, task.next_panel, task.panel_bytes, turns);
}

template <class Weights>
CONCLAVE_KERNEL_INLINE void compute_blocks(const PanelTask& task, Ahead& ahead) {
  for (int64_t first = 0; first < task.num_rows; first += kMaxStripRows) {
    compute_by_strips<Weights>(task, first, lesser(kMaxStripRows, task.num_rows - first), ahead);
  }
}

// A PanelFunction for rows of float32.
template <class Format>
void compute_coded_panel(const PanelTask& task) noexcept {
  if (task.num_rows == 0) return;
  Ahead ahead = fetch_codes(task);
  // With an order each k looks its group up, which strips do once for all rows.
  if (task.num_rows <= kMaxDirectRows && task.order.lower == nullptr) {
    call_for<kMaxDirectRows>(task.num_rows, ComputeDirectTile<Format>{task, ahead});
    return;
  }
  compute_blocks<WidenedCodes<Format>>(task, ahead);
}

// The product for weights of one of the formats; null if they are of another.
template <class... Formats>
PanelFunction coded_product(DType weights, quant::FormatList<Formats...>) noexcept {
  PanelFunction product = nullptr;
  ((weights == Formats::kElement ? void(product = &compute_coded_panel<Formats>) : void()), ...);
  return product;
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
