// Rows of int8 codes times one packed panel of codes whose values are whole numbers:
// reference_coded_product by integer dot products of bytes. The sum of a segment is exact in
// float32 too (RowScales::exact_k), so that the bits are those of any other way to add it up.
//
// Weights are made unsigned by an offset; sums begin with what that adds, taken from the sum of the
// row's codes. Each tile of rows interleaves the weights again: that costs less than to store them.
// How wide vectors are, and how bytes are multiplied, is up to wholes_*-inl.h.
#pragma once

#include "gemm/cpu/ahead-inl.h"
#include "gemm/cpu/finish-inl.h"
#include "gemm/cpu/group_numbers-inl.h"
#include "quant/formats.h"

#include "conclave/dtype.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Quads between two turns of fetching the next panel.
inline constexpr int64_t kQuadsPerTurn = 4;
// A slice of a panel has as many columns as four vectors have lanes.
inline constexpr int kSliceColumns = 4 * Vec::kLanes;

// Four rows of a panel.
template <class Weights>
CONCLAVE_KERNEL_INLINE Quads load_quads(const std::byte* codes, int slice) {
  constexpr int64_t kBytes = Weights::kRowBytes;
  return Weights::load_rows(codes, codes + kBytes, codes + 2 * kBytes, codes + 3 * kBytes, slice);
}
// Loads rows [first, end) of a group of four; the rest are zero and are not read.
template <class Weights>
CONCLAVE_KERNEL_INLINE Quads load_some_quads(const std::byte* codes, int64_t first, int64_t end,
                                             int slice) {
  const auto row = [&](int64_t k) {
    return codes + (k < first ? first : k < end ? k : end - 1) * Weights::kRowBytes;
  };
  Quads quads = Weights::load_rows(row(0), row(1), row(2), row(3), slice);
  const auto below = [](int64_t k) { return static_cast<uint32_t>((uint64_t{1} << (8 * k)) - 1); };
  const Ints there = Ints::broadcast(static_cast<int32_t>(below(end) & ~below(first)));
#pragma GCC unroll 4
  for (Ints& value : quads.value) value = Ints::both(value, there);
  return quads;
}

// Codes of one row from a k on.
CONCLAVE_KERNEL_INLINE Ints broadcast_codes(const std::byte* codes) {
  int32_t four;
  __builtin_memcpy(&four, codes, sizeof(four));
  return Ints::broadcast(four);
}

template <int kRows>
struct CodeRows {
  const std::byte* codes[kRows];
  const float* scales[kRows];
  const int32_t* sums[kRows];  // one for each segment

  CONCLAVE_KERNEL_INLINE CodeRows(const PanelTask& task, int64_t first_row) {
    for (int r = 0; r < kRows; ++r) {
      const int64_t slot = first_row + r;
      const int64_t row = task.row_index != nullptr ? task.row_index[slot] : slot;
      codes[r] = task.rows + row * task.row_bytes;
      scales[r] = task.row_scales.of_row(row, task.row_bytes);
      sums[r] = task.row_scales.sums_of_row(row, task.row_bytes);
    }
  }
};

// Numbers of a slice's columns in the order of quads' lanes, or back.
template <class Weights>
CONCLAVE_KERNEL_INLINE void reorder(const float* from, float* to) {
  Vec of[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) of[j] = Vec::load(from + j * Vec::kLanes);
  Weights::swap_order(of);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) of[j].store(to + j * Vec::kLanes);
}

// total + sum * row scale * scale, as the reference rounds it.
template <class Weights>
CONCLAVE_KERNEL_INLINE void add_scaled(float* total, Ints sum, Vec row_scale, const float* scale) {
  constexpr float kUnit = Weights::kWhole.unit;
  Vec partial = sum.to_floats();
  if constexpr (kUnit != 1.0F) partial = Vec::mul(partial, Vec::broadcast(kUnit));
  const Vec scaled = Vec::mul(Vec::mul(partial, row_scale), Vec::load(scale));
  Vec::add(Vec::load(total), scaled).store(total);
}

// The sums of a tile and a slice, as they grow within a segment.
template <class Weights, int kRows>
struct IntegerTile {
  Ints sum[kRows][4];

  CONCLAVE_KERNEL_INLINE void begin(const CodeRows<kRows>& rows, int64_t segment) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Ints added = Ints::broadcast(-Weights::kOffset * rows.sums[r][segment]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum[r][j] = added;
    }
  }
  CONCLAVE_KERNEL_INLINE void multiply_add(const CodeRows<kRows>& rows, int64_t k,
                                           const Quads& weights) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Ints codes = broadcast_codes(rows.codes[r] + k);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        sum[r][j].template add_products<Weights>(weights.value[j], codes);
      }
    }
  }
  CONCLAVE_KERNEL_INLINE void add_to(float* totals, const CodeRows<kRows>& rows, int64_t row_group,
                                     const float* scales) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec row_scale = Vec::broadcast(rows.scales[r][row_group]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const int at = j * Vec::kLanes;
        add_scaled<Weights>(totals + r * 64 + at, sum[r][j], row_scale, scales + at);
      }
    }
  }
};

// Adds the products of a slice's columns over one segment to the totals.
template <class Weights, int kRows>
CONCLAVE_KERNEL_INLINE void add_segment(const PanelTask& task, const CodeRows<kRows>& rows,
                                        const SegmentWalk& segment, int slice, float* totals,
                                        Ahead& ahead) {
  const int64_t begin = segment.begin();
  const int64_t end = segment.end();
  const int64_t whole = begin + (end - begin) / 4 * 4;
  const std::byte* codes = task.panel + begin * Weights::kRowBytes;
  IntegerTile<Weights, kRows> tile;
  tile.begin(rows, segment.segment());
  for (int64_t turn = begin; turn < whole; turn += 4 * kQuadsPerTurn) {
    ahead.turn();
    const int64_t stop = whole < turn + 4 * kQuadsPerTurn ? whole : turn + 4 * kQuadsPerTurn;
    for (int64_t k = turn; k < stop; k += 4, codes += 4 * Weights::kRowBytes) {
      tile.multiply_add(rows, k, load_quads<Weights>(codes, slice));
    }
  }
  if (whole < end) {
    tile.multiply_add(rows, whole, load_some_quads<Weights>(codes, 0, end - whole, slice));
  }
  const int64_t column = slice * kSliceColumns;
  alignas(64) float room[64];
  alignas(64) float scales[kSliceColumns];
  reorder<Weights>(numbers_of(task.scales, segment.weights_group(), room) + column, scales);
  tile.add_to(totals + column, rows, segment.rows_group(), scales);
}

// Sums of rows in the order of lanes become output rows.
template <class Weights>
CONCLAVE_KERNEL_INLINE void finish_integer_rows(const PanelTask& task, int64_t first_row,
                                                int64_t num_rows, float* totals) {
  for (float* slice = totals; slice < totals + num_rows * 64; slice += kSliceColumns) {
    reorder<Weights>(slice, slice);
  }
  finish_tile(task, {.sums = totals,
                     .first_row = first_row,
                     .num_rows = num_rows,
                     .out = task.out + first_row * task.out_row_bytes,
                     .out_row_bytes = task.out_row_bytes,
                     .out_block_bytes = task.out_block_bytes});
}

CONCLAVE_KERNEL_INLINE WeightGroups groups_of(const PanelTask& task) {
  return {.k = task.k, .width = task.scale_width, .skip = task.scale_skip};
}

// Whether the totals of rows fit in registers beside their sums. If they do not, they are hidden
// from GCC between segments: it would otherwise keep them in registers, and spill them as well as
// store them.
template <int kRows>
inline constexpr bool kTotalsFit = 3 * kRows <= kMaxIntegerTileRows;

// Rows first_row + [0, kRows) of a task.
template <class Weights, int kRows>
void compute_integer_tile(const PanelTask& task, int64_t first_row, Ahead& ahead) {
  const CodeRows<kRows> rows(task, first_row);
  alignas(64) float totals[kRows * 64] = {};
  for (SegmentWalk walk(groups_of(task), task.row_scales); !walk.done(); walk.next()) {
    if constexpr (!kTotalsFit<kRows>) __asm__("" : "+m"(totals));
#pragma GCC unroll 2
    for (int slice = 0; slice < Quads::kSlices; ++slice) {
      add_segment<Weights, kRows>(task, rows, walk, slice, totals, ahead);
    }
  }
  finish_integer_rows<Weights>(task, first_row, kRows, totals);
}

// function.template call<N>() for N = count, at most kMost.
template <int kMost, class Function>
CONCLAVE_KERNEL_INLINE void with_rows(int64_t count, const Function& function) {
  if constexpr (kMost > 1) {
    if (count < kMost) return with_rows<kMost - 1>(count, function);
  }
  function.template call<kMost>();
}

template <class Weights>
struct ComputeIntegerTile {
  const PanelTask& task;
  int64_t first_row;
  Ahead& ahead;

  template <int kRows>
  CONCLAVE_KERNEL_INLINE void call() const {
    compute_integer_tile<Weights, kRows>(task, first_row, ahead);
  }
};

// A PanelFunction for rows of codes.
template <class Format>
struct IntegerPanel {
  static void compute(const PanelTask& task) noexcept {
    using Weights = WholeWeights<Format>;
    if (task.num_rows == 0) return;
    const int64_t tiles = (task.num_rows + kMaxIntegerTileRows - 1) / kMaxIntegerTileRows;
    const int64_t turns = (task.k + 4 * kQuadsPerTurn - 1) / (4 * kQuadsPerTurn);
    Ahead ahead =
        Ahead::during(tiles, task.panel, task.next_panel, task.panel_bytes, turns * Quads::kSlices);
    for (int64_t t = 0, row = 0; t < tiles; ++t) {
      const int64_t rows = task.num_rows / tiles + (t < task.num_rows % tiles ? 1 : 0);
      with_rows<kMaxIntegerTileRows>(rows, ComputeIntegerTile<Weights>{task, row, ahead});
      row += rows;
    }
  }
};

template <template <class> class Panel, class Format>
constexpr PanelFunction integer_product_of() noexcept {
  if constexpr (quant::whole_codes<Format>().fit) return &Panel<Format>::compute;
  return nullptr;
}

// The product for weights of one of the formats, by Panel<Format>::compute; null if their values
// are not whole numbers.
template <template <class> class Panel, class... Formats>
PanelFunction integer_product(DType weights, quant::FormatList<Formats...>) noexcept {
  PanelFunction product = nullptr;
  ((weights == Formats::kElement ? void(product = integer_product_of<Panel, Formats>()) : void()),
   ...);
  return product;
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
