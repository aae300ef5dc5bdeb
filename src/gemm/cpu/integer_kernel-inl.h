// Rows of int8 codes times one packed panel of codes whose values are whole numbers:
// reference_coded_product by integer dot products (vpdpbusd). The sum of a segment is exact in
// float32 too (RowScales::exact_k), so that the bits are those of any other way to add it up.
//
// Weights are made unsigned by an offset; sums begin with what that adds, taken from the sum of the
// row's codes. Each tile of rows interleaves the weights again: that costs less than to store them.
#pragma once

#include "gemm/cpu/ahead-inl.h"
#include "gemm/cpu/finish-inl.h"
#include "gemm/cpu/whole_weights-inl.h"
#include "quant/formats.h"

#include "conclave/dtype.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// 24 sums leave registers for weights on their way into quads.
inline constexpr int kMaxIntegerTileRows = 6;
// Quads between two turns of fetching the next panel.
inline constexpr int64_t kQuadsPerTurn = 4;

CONCLAVE_KERNEL_INLINE void add_products(__m512i& sum, __m512i weights, __m512i codes) {
  // Spelled out for the reason that Vec::accumulate is.
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(codes));
}

// Codes of one row from a k on.
CONCLAVE_KERNEL_INLINE __m512i broadcast_codes(const std::byte* codes) {
  int32_t four;
  __builtin_memcpy(&four, codes, sizeof(four));
  return _mm512_set1_epi32(four);
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
      const std::byte* const scales_of_row = task.row_scales.first + row * task.row_bytes;
      scales[r] = reinterpret_cast<const float*>(scales_of_row);
      sums[r] = reinterpret_cast<const int32_t*>(scales_of_row + task.row_scales.sums_at);
    }
  }
};

// Scales of weights in the order of quads' lanes.
template <class Weights>
CONCLAVE_KERNEL_INLINE void load_scales(const float* from, float* scales) {
  __m512 of[4];
  for (int j = 0; j < 4; ++j) of[j] = _mm512_loadu_ps(from + j * 16);
  Weights::swap_order(of);
  for (int j = 0; j < 4; ++j) _mm512_store_ps(scales + j * 16, of[j]);
}

// The sums of a tile, as they grow within a segment.
template <int kRows>
struct IntegerTile {
  __m512i sum[kRows][4];

  template <class Weights>
  CONCLAVE_KERNEL_INLINE void begin(const CodeRows<kRows>& rows, int64_t segment) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512i added = _mm512_set1_epi32(-Weights::kOffset * rows.sums[r][segment]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum[r][j] = added;
    }
  }
  CONCLAVE_KERNEL_INLINE void multiply_add(const CodeRows<kRows>& rows, int64_t k,
                                           const __m512i (&weights)[4]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512i codes = broadcast_codes(rows.codes[r] + k);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) add_products(sum[r][j], weights[j], codes);
    }
  }
  // total + sum * row scale * scale, as the reference rounds it.
  template <class Weights>
  CONCLAVE_KERNEL_INLINE void add_to(float* totals, const CodeRows<kRows>& rows, int64_t row_group,
                                     const float* scales) const {
    constexpr float kUnit = Weights::kWhole.unit;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec row_scale = Vec::broadcast(rows.scales[r][row_group]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        float* const total = totals + r * 64 + j * 16;
        Vec partial = {_mm512_cvtepi32_ps(sum[r][j])};
        if constexpr (kUnit != 1.0F) partial = Vec::mul(partial, Vec::broadcast(kUnit));
        const Vec scaled = Vec::mul(Vec::mul(partial, row_scale), Vec::load(scales + j * 16));
        Vec::add(Vec::load(total), scaled).store(total);
      }
    }
  }
};

// Sums of rows in the order of lanes become output rows.
template <class Weights>
CONCLAVE_KERNEL_INLINE void finish_integer_rows(const PanelTask& task, int64_t first_row,
                                                int64_t num_rows, float* totals) {
  for (int64_t r = 0; r < num_rows; ++r) {
    float* const row = totals + r * 64;
    __m512 of[4];
    for (int j = 0; j < 4; ++j) of[j] = _mm512_load_ps(row + j * 16);
    Weights::swap_order(of);
    for (int j = 0; j < 4; ++j) _mm512_store_ps(row + j * 16, of[j]);
  }
  finish_tile(task, {.sums = totals,
                     .num_rows = num_rows,
                     .out = task.out + first_row * task.out_row_bytes,
                     .out_row_bytes = task.out_row_bytes,
                     .out_block_bytes = task.out_block_bytes});
}

// Rows first_row + [0, kRows) of a task.
template <class Weights, int kRows>
void compute_integer_tile(const PanelTask& task, int64_t first_row, Ahead& ahead) {
  const CodeRows<kRows> rows(task, first_row);
  alignas(64) float totals[kRows * 64] = {};
  alignas(64) float scales[64];
  const WeightGroups groups{.k = task.k, .width = task.scale_width, .skip = task.scale_skip};
  for (SegmentWalk walk(groups, task.row_scales); !walk.done(); walk.next()) {
    const int64_t begin = walk.begin();
    const int64_t end = walk.end();
    const int64_t whole = begin + (end - begin) / 4 * 4;
    const std::byte* codes = task.panel + begin * Weights::kRowBytes;
    IntegerTile<kRows> tile;
    tile.template begin<Weights>(rows, walk.segment());
    for (int64_t turn = begin; turn < whole; turn += 4 * kQuadsPerTurn) {
      ahead.turn();
      const int64_t stop = whole < turn + 4 * kQuadsPerTurn ? whole : turn + 4 * kQuadsPerTurn;
      for (int64_t k = turn; k < stop; k += 4, codes += 4 * Weights::kRowBytes) {
        tile.multiply_add(rows, k, Weights::load(codes).value);
      }
    }
    if (whole < end) {
      tile.multiply_add(rows, whole, Weights::load_first(codes, end - whole).value);
    }
    load_scales<Weights>(task.scales + walk.weights_group() * 64, scales);
    tile.template add_to<Weights>(totals, rows, walk.rows_group(), scales);
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
void compute_integer_panel(const PanelTask& task) noexcept {
  using Weights = WholeWeights<Format>;
  if (task.num_rows == 0) return;
  const int64_t tiles = (task.num_rows + kMaxIntegerTileRows - 1) / kMaxIntegerTileRows;
  const int64_t turns = (task.k + 4 * kQuadsPerTurn - 1) / (4 * kQuadsPerTurn);
  Ahead ahead(task.next_panel, task.k * Weights::kRowBytes, turns * tiles);
  for (int64_t t = 0, row = 0; t < tiles; ++t) {
    const int64_t rows = task.num_rows / tiles + (t < task.num_rows % tiles ? 1 : 0);
    with_rows<kMaxIntegerTileRows>(rows, ComputeIntegerTile<Weights>{task, row, ahead});
    row += rows;
  }
}

template <class Format>
constexpr PanelFunction integer_product_of() noexcept {
  if constexpr (quant::whole_codes<Format>().fit) return &compute_integer_panel<Format>;
  return nullptr;
}

// The product for weights of one of the formats; null if their values are not whole numbers.
template <class... Formats>
PanelFunction integer_product(DType weights, quant::FormatList<Formats...>) noexcept {
  PanelFunction product = nullptr;
  ((weights == Formats::kElement ? void(product = integer_product_of<Formats>()) : void()), ...);
  return product;
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
