// Groups of 16 rows of bf16 times one packed panel of codes with scales, on tile registers: the
// arithmetic of coded_pairs-inl.h but for the order in which a tile adds products. Plain rows come
// interleaved (tiles-inl.h), rows of codes as they are.
//
// All groups share strips of decoded weights. A tile takes 32 k at once, from a multiple of 32 on;
// where a scale begins or ends among them, the weights of others are zeros.
#pragma once

#include "gemm/cpu/coded_pieces-inl.h"
#include "gemm/cpu/pair_sums-inl.h"
#include "gemm/cpu/tile_kernel-inl.h"
#include "quant/formats.h"

#include "conclave/dtype.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Groups that share a strip, and whose sums lie beside it; no block of a work list has more.
inline constexpr int64_t kMaxCodedGroups = 6;
inline constexpr int64_t kTilePairs = kTileK / 2;

// The tiles of a piece, counted from that of k = 0.
CONCLAVE_KERNEL_INLINE int64_t first_tile(const Piece& piece) { return piece.begin / kTileK; }
CONCLAVE_KERNEL_INLINE int64_t end_tile(const Piece& piece) {
  return (piece.end + kTileK - 1) / kTileK;
}

// Decoded weights: 16 KiB, in the first-level cache, for each term.
template <class Format>
struct TileStrip {
  static constexpr int kTerms = quant::kBf16Terms<Format>;
  static constexpr int64_t kTiles = 4;

  alignas(64) uint32_t weights[kTerms][kTiles * kTilePairs][64];
  Piece pieces[kTiles];
  int64_t num_pieces = 0;

  // Decodes as many of the next pieces as there is room for.
  CONCLAVE_KERNEL_INLINE void fill(const PanelTask& task, Pieces& from, Ahead& ahead) {
    num_pieces = 0;
    for (int64_t tile = 0; tile < kTiles && !from.done();) {
      const Piece piece = from.take((from.k() / kTileK + kTiles - tile) * kTileK);
      fetch_scales(task, piece);
      decode<0>(task, piece, weights[0] + tile * kTilePairs, ahead);
      if constexpr (kTerms == 2) decode<1>(task, piece, weights[1] + tile * kTilePairs, ahead);
      pieces[num_pieces++] = piece;
      tile += end_tile(piece) - first_tile(piece);
    }
  }

 private:
  template <int kTerm>
  static CONCLAVE_KERNEL_INLINE void decode(const PanelTask& task, const Piece& piece,
                                            uint32_t (*out)[64], Ahead& ahead) {
    using Decoder = PairDecoder<Format, kTerm>;
    const Decoder decoder;
    const int64_t end = end_tile(piece) * kTilePairs;
    for (int64_t pair = first_tile(piece) * kTilePairs; pair < end; ++pair, ++out) {
      if (kTerm == 0 && pair % kTilePairs == 0) ahead.turn();
      PairRow pairs = PairRow::zero();
      if (pair >= piece.first_pair() && pair < piece.end_pair()) {
        const std::byte* const codes = task.panel + pair * Decoder::kPairBytes;
        if constexpr (kTerm == 0) fetch_codes<Decoder::kPairBytes>(codes);
        pairs = decoder.load(codes);
        if (2 * pair < piece.begin || 2 * pair + 2 > piece.end) {
          pairs.keep(2 * pair, piece.begin, piece.end);
        }
      }
      pairs.store(*out);
    }
  }
};

// The sums of a piece of one group.
CONCLAVE_KERNEL_INLINE void load_sums(const GroupSums& sums) {
  _tile_loadd(0, sums.value[0], kSumRowBytes);
  _tile_loadd(1, sums.value[0] + 16, kSumRowBytes);
  _tile_loadd(2, sums.value[0] + 32, kSumRowBytes);
  _tile_loadd(3, sums.value[0] + 48, kSumRowBytes);
}
CONCLAVE_KERNEL_INLINE void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
CONCLAVE_KERNEL_INLINE void store_sums(GroupSums& sums) {
  _tile_stored(0, sums.value[0], kSumRowBytes);
  _tile_stored(1, sums.value[0] + 16, kSumRowBytes);
  _tile_stored(2, sums.value[0] + 32, kSumRowBytes);
  _tile_stored(3, sums.value[0] + 48, kSumRowBytes);
}

// Adds 32 k of 16 rows: weights are 16 rows of pairs.
CONCLAVE_KERNEL_INLINE void add_tile(const TileOfRows& rows, const uint32_t (*weights)[64]) {
  _tile_loadd(4, rows.first, rows.stride);
  _tile_loadd(6, weights[0], kPanelRowBytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, weights[0] + 16, kPanelRowBytes);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(6, weights[0] + 32, kPanelRowBytes);
  _tile_dpbf16ps(2, 4, 6);
  _tile_loadd(7, weights[0] + 48, kPanelRowBytes);
  _tile_dpbf16ps(3, 4, 7);
}

// Rows of one group of a task, and their sums: of a piece that the next strip continues, and of all
// pieces that ended.
struct CodedGroup {
  const std::byte* rows = nullptr;  // plain rows, interleaved
  int64_t num_rows = 0;
  // The values and scales of each row of codes.
  const std::byte* values[kTileRows];
  const float* scales[kTileRows];
  GroupSums partial;
  GroupSums total;
  alignas(64) float of_groups[kTileRows][kSumsTogether];  // sums of the rows' own values
};

CONCLAVE_KERNEL_INLINE void sum_rows(const PanelTask& task, const Piece& piece, CodedGroup& group) {
  for (int64_t r = 0; r < group.num_rows; ++r) {
    // Tiles of k follow each other 16 rows apart.
    const auto* values = reinterpret_cast<const uint16_t*>(group.rows + r * kTileRowBytes);
    sum_next_groups(task, piece, {values, kTileBytes / 2}, group.of_groups[r]);
  }
}

CONCLAVE_KERNEL_INLINE void scale_sums(const PanelTask& task, const Piece& piece,
                                       CodedGroup& group) {
  const PieceNumbers numbers(task, piece);
  for (int64_t r = 0; r < group.num_rows; ++r) {
    Vec partial[kPairVectors];
    for (int j = 0; j < kPairVectors; ++j) {
      partial[j] = Vec::load(group.partial.value[r] + j * Vec::kLanes);
    }
    if (task.row_scales.first != nullptr) {
      add_group_of_codes(piece, numbers, partial, group.scales[r], group.total.value[r]);
    } else if (!task.offsets.exist()) {
      add_group<false>(piece, numbers, partial, nullptr, group.total.value[r]);
    } else {
      add_group<true>(piece, numbers, partial, group.of_groups[r], group.total.value[r]);
    }
  }
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
      if (task.offsets.exist()) sum_rows(task, piece, group);
      clear_sums();
    } else {
      load_sums(group.partial);
    }
    for (int64_t tile = first_tile(piece); tile < end_tile(piece); ++tile, at += kTilePairs) {
      const TileOfRows values = rows.tile(tile);
      for (int term = 0; term < TileStrip<Format>::kTerms; ++term) {
        add_tile(values, strip.weights[term] + at);
      }
    }
    store_sums(group.partial);
    if (piece.ends) scale_sums(task, piece, group);
  }
}

// Finds the rows of codes of a group, of which task row `first` is the first.
CONCLAVE_KERNEL_INLINE void find_rows(const PanelTask& task, int64_t first, CodedGroup& group) {
  for (int64_t r = 0; r < group.num_rows; ++r) {
    const int64_t slot = first + r;
    const int64_t row = task.row_index != nullptr ? task.row_index[slot] : slot;
    group.values[r] = task.rows + row * task.row_bytes;
    group.scales[r] = task.row_scales.of_row(row, task.row_bytes);
  }
}

// Groups [first, first + count), at most kMaxCodedGroups, of which the last may have fewer rows.
template <class Format>
void compute_groups_of_codes(const PanelTask& task, int64_t first, int64_t count, Ahead& ahead) {
  CodedGroup groups[kMaxCodedGroups];
  for (int64_t g = 0; g < count; ++g) {
    const int64_t row = (first + g) * kTileRows;
    groups[g].rows = task.rows + row * task.row_bytes;
    groups[g].num_rows = lesser(kTileRows, task.num_rows - row);
    if (task.row_scales.first != nullptr) find_rows(task, row, groups[g]);
    for (auto& sums : groups[g].total.value) {
      for (int64_t c = 0; c < 64; c += Vec::kLanes) Vec::zero().store(sums + c);
    }
  }
  TileStrip<Format> strip;
  int64_t configured = 0;
  for (Pieces pieces(task); !pieces.done();) {
    strip.fill(task, pieces, ahead);
    for (int64_t g = 0; g < count; ++g) {
      if (groups[g].num_rows != configured) {
        configured = groups[g].num_rows;
        configure_tiles(static_cast<int>(configured), 0);
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
  const int64_t groups = (task.num_rows + kTileRows - 1) / kTileRows;
  const int64_t blocks = (groups + kMaxCodedGroups - 1) / kMaxCodedGroups;
  Ahead ahead = fetch_panel<Format>(task, (task.k / kTileK + 1) * blocks);
  for (int64_t first = 0; first < groups; first += kMaxCodedGroups) {
    compute_groups_of_codes<Format>(task, first, lesser(kMaxCodedGroups, groups - first), ahead);
  }
  if (groups > 0) _tile_release();
}

// The product for weights of one of the formats; null if they are of another.
template <class... Formats>
PanelFunction product_on_tiles(DType weights, quant::FormatList<Formats...>) noexcept {
  PanelFunction product = nullptr;
  ((weights == Formats::kElement ? void(product = &compute_codes_on_tiles<Formats>) : void()), ...);
  return product;
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
