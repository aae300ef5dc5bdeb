// Groups of 16 rows of bf16 times one packed panel of codes with scales, on tile registers: the
// arithmetic of coded_pairs-inl.h but for the order in which a tile adds products. Plain rows come
// interleaved (tiles-inl.h), rows of codes as they are.
//
// All groups share strips of decoded weights. A tile takes 32 k at once, from a multiple of 32 on;
// where a scale begins or ends among them, the weights of others are zeros. Few rows leave tiles
// alone (coded_wide_rows-inl.h).
#pragma once

#include "gemm/cpu/coded_wide_rows-inl.h"
#include "quant/formats.h"

#include "conclave/dtype.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Groups that share a strip, and whose sums lie beside it; no block of a work list has more.
inline constexpr int64_t kMaxCodedGroups = 6;

// Decoded weights: 16 KiB, in the first-level cache, for each term.
template <class Format>
struct TileStrip {
  static constexpr int kTerms = quant::kBf16Terms<Format>;
  static constexpr int64_t kTiles = 4;

  alignas(64) uint32_t weights[kTerms][kTiles * kTilePairs][64];
  Piece pieces[kTiles];
  int64_t num_pieces = 0;

  // Decodes as many of the next pieces as there is room for.
  CONCLAVE_KERNEL_INLINE void fill(const PanelTask& task, Pieces& from, const AlongPanel& along) {
    num_pieces = 0;
    for (int64_t tile = 0; tile < kTiles && !from.done();) {
      const Piece piece = from.take((from.k() / kTileK + kTiles - tile) * kTileK);
      fetch_scales(task, piece);
      decode<0>(task, piece, weights[0] + tile * kTilePairs, along);
      if constexpr (kTerms == 2) decode<1>(task, piece, weights[1] + tile * kTilePairs, along);
      pieces[num_pieces++] = piece;
      tile += end_tile(piece) - first_tile(piece);
    }
  }

 private:
  template <int kTerm>
  static CONCLAVE_KERNEL_INLINE void decode(const PanelTask& task, const Piece& piece,
                                            uint32_t (*out)[64], const AlongPanel& along) {
    using Decoder = PairDecoder<Format, kTerm>;
    constexpr int64_t kBytes = Decoder::kPairBytes;
    const Decoder decoder;
    const int64_t end = end_tile(piece) * kTilePairs;
    const std::byte* const fetched = along.fetched(end * kBytes);
    for (int64_t pair = first_tile(piece) * kTilePairs; pair < end; ++pair, ++out) {
      PairRow pairs = PairRow::zero();
      if (pair >= piece.first_pair() && pair < piece.end_pair()) {
        pairs = decoder.load(task.panel + pair * kBytes);
        if constexpr (kTerm == 0) prefetch_lines<kBytes>(fetched + pair * kBytes);
        if (2 * pair < piece.begin || 2 * pair + 2 > piece.end) {
          pairs.keep(2 * pair, piece.begin, piece.end);
        }
      }
      pairs.store(*out);
    }
  }
};

// Adds 32 k of 16 rows: weights are 16 rows of pairs.
CONCLAVE_KERNEL_INLINE void add_tile(const TileOfRows& rows, const uint32_t (*weights)[64]) {
  _tile_loadd(4, rows.first, rows.stride);
  _tile_loadd(6, weights[0], kPairRowBytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, weights[0] + 16, kPairRowBytes);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(6, weights[0] + 32, kPairRowBytes);
  _tile_dpbf16ps(2, 4, 6);
  _tile_loadd(7, weights[0] + 48, kPairRowBytes);
  _tile_dpbf16ps(3, 4, 7);
}

// Sets out what a group has for its tiles. Rows of codes that lie anywhere are brought together;
// others are loaded where they are.
class GroupRows {
 public:
  CONCLAVE_KERNEL_INLINE GroupRows(const PanelTask& task, const CodedGroup& group)
      : task_(task), group_(group) {}

  CONCLAVE_KERNEL_INLINE TileOfRows tile(int64_t index) {
    if (task_.row_scales.first == nullptr) {
      return {group_.rows + index * kTileBytes, kTileRowBytes};
    }
    const int64_t at = index * kTileRowBytes;
    if (task_.row_index == nullptr) return {group_.values[0] + at, task_.row_bytes};
    return gathered_.gather(group_.values, group_.num_rows, at);
  }

 private:
  GatheredTiles gathered_;
  const PanelTask& task_;
  const CodedGroup& group_;
};

template <class Format>
void add_strip_on_tiles(const PanelTask& task, const TileStrip<Format>& strip, CodedGroup& group) {
  GroupRows rows(task, group);
  settle_memory();
  int64_t at = 0;
  for (int64_t p = 0; p < strip.num_pieces; ++p) {
    const Piece piece = strip.pieces[p];
    if (piece.begins) {
      sum_rows(task, piece, group);
      clear_sums();
    } else {
      load_sums(group.partial.value[0]);
    }
    for (int64_t tile = first_tile(piece); tile < end_tile(piece); ++tile, at += kTilePairs) {
      const TileOfRows values = rows.tile(tile);
      for (int term = 0; term < TileStrip<Format>::kTerms; ++term) {
        add_tile(values, strip.weights[term] + at);
      }
    }
    store_sums(group.partial.value[0]);
    if (piece.ends) scale_sums(task, piece, group.partial.value, group);
  }
}

// Groups [first, first + count), at most kMaxCodedGroups, of which the last may have fewer rows.
template <class Format>
void compute_groups_of_codes(const PanelTask& task, int64_t first, int64_t count,
                             const AlongPanel& along) {
  CodedGroup groups[kMaxCodedGroups];
  for (int64_t g = 0; g < count; ++g) begin_group(task, first + g, groups[g]);
  TileStrip<Format> strip;
  int64_t configured = 0;
  for (Pieces pieces(task); !pieces.done();) {
    strip.fill(task, pieces, along);
    for (int64_t g = 0; g < count; ++g) {
      if (groups[g].num_rows != configured) {
        configured = groups[g].num_rows;
        configure_tiles(static_cast<int>(configured));
      }
      add_strip_on_tiles(task, strip, groups[g]);
    }
  }
  for (int64_t g = 0; g < count; ++g) {
    finish_group(task, first + g, groups[g].num_rows, groups[g].total);
  }
}

// A PanelFunction; plain rows come in groups, without an index.
template <class Format>
void compute_codes_on_tiles(const PanelTask& task) noexcept {
  if (task.num_rows <= kMaxWideRows) {
    if (task.num_rows > 0) call_for<kMaxWideRows>(task.num_rows, ComputeWideRows<Format>{task});
    return;
  }
  const int64_t groups = (task.num_rows + kTileRows - 1) / kTileRows;
  for (int64_t first = 0; first < groups; first += kMaxCodedGroups) {
    const bool is_last = first + kMaxCodedGroups >= groups;
    const AlongPanel along(task.panel, is_last ? task.next_panel : task.panel,
                           task.k * Format::kBits * 8);
    compute_groups_of_codes<Format>(task, first, lesser(kMaxCodedGroups, groups - first), along);
  }
  _tile_release();
}

// The product for weights of one of the formats; null if they are of another.
template <class... Formats>
PanelFunction product_on_tiles(DType weights, quant::FormatList<Formats...>) noexcept {
  PanelFunction product = nullptr;
  ((weights == Formats::kElement ? void(product = &compute_codes_on_tiles<Formats>) : void()), ...);
  return product;
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
