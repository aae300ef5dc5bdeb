// Few rows of bf16 times one packed panel of codes, on vectors, in the order of tiles
// (tile_order-inl.h). The weights of other scales among the 32 k of a tile are zeros, which make
// NaN of infinite values.
#pragma once

#include "gemm/cpu/coded_groups-inl.h"
#include "gemm/cpu/panel_codes-inl.h"
#include "gemm/cpu/tile_order-inl.h"
#include "quant/code_values.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Decodes the rows of an even k and the next one: whole numbers of 8 bits, one by one.
template <class Format, int kTerm>
struct WideDecoder {
  static_assert(quant::kBf16Terms<Format> == 1);
  static constexpr int64_t kRowBytes = Format::kBits * 8;

  CONCLAVE_KERNEL_INLINE EvenAndOdd load(const std::byte* codes) const {
    EvenAndOdd wide;
#pragma GCC unroll 4
    for (int j = 0; j < kPairVectors; ++j) {
      wide.even[j] = PanelCodes<Format>::template load<kPairVectors>(codes, 0, j);
      wide.odd[j] = PanelCodes<Format>::template load<kPairVectors>(codes + kRowBytes, 0, j);
    }
    return wide;
  }
};

// Floats of 8 bits and codes of 6, by tables of pairs.
template <class Format, int kTerm>
  requires(quant::has_sign_bit<Format>() || Format::kBits == 6)
struct WideDecoder<Format, kTerm> {
  static constexpr int64_t kRowBytes = Format::kBits * 8;
  PairDecoder<Format, kTerm> pairs;

  CONCLAVE_KERNEL_INLINE EvenAndOdd load(const std::byte* codes) const {
    const PairRow row = pairs.load(codes);
    EvenAndOdd wide;
#pragma GCC unroll 4
    for (int j = 0; j < kPairVectors; ++j) {
      wide.even[j] = row.of[j].bf16_first();
      wide.odd[j] = row.of[j].bf16_second();
    }
    return wide;
  }
};

// Codes of 4 bits, by a table of what term `kTerm` of each is.
template <class Format, int kTerm>
consteval quant::ValuesByCode list_terms() {
  constexpr const quant::Bf16Bytes& kBytes = quant::kBf16ByCode<Format, kTerm>;
  quant::ValuesByCode terms{};
  for (int code = 0; code < 16; ++code) {
    const int bits = kBytes.low[code] | kBytes.high[code] << 8;
    terms.of[code] = quant::widen_bf16(static_cast<uint16_t>(bits));
  }
  return terms;
}
template <class Format, int kTerm>
  requires(Format::kBits == 4)
struct WideDecoder<Format, kTerm> {
  static constexpr int64_t kRowBytes = Format::kBits * 8;
  static constexpr quant::ValuesByCode kTerms = list_terms<Format, kTerm>();

  CONCLAVE_KERNEL_INLINE EvenAndOdd load(const std::byte* codes) const {
    EvenAndOdd wide;
#pragma GCC unroll 4
    for (int j = 0; j < kPairVectors; ++j) {
      wide.even[j] = look_up(codes, j);
      wide.odd[j] = look_up(codes + kRowBytes, j);
    }
    return wide;
  }

 private:
  // A byte has the columns c and c + 32.
  static CONCLAVE_KERNEL_INLINE Vec look_up(const std::byte* row, int j) {
    constexpr int kHalf = kPairVectors / 2;
    const std::byte* const bytes = row + j % kHalf * Vec::kLanes;
    return j < kHalf ? Vec::look_up_u4<false>(kTerms.of, bytes)
                     : Vec::look_up_u4<true>(kTerms.of, bytes);
  }
};

// Some pieces of k: the rows' values there, and the sums of each piece.
template <int kRows>
struct TileBlock {
  static constexpr int64_t kTiles = WideValues<kRows>::kTiles;

  WideValues<kRows> values;
  alignas(64) float sums[kTiles][kRows][64];
  Piece pieces[kTiles];
  int64_t num_pieces = 0;
  int64_t begin_tile = 0;

  // Takes the next pieces; those that share a tile count it each.
  CONCLAVE_KERNEL_INLINE void take(const PanelTask& task, Pieces& from) {
    num_pieces = 0;
    begin_tile = from.k() / kTileK;
    for (int64_t tile = 0; tile < kTiles && !from.done();) {
      const Piece piece = from.take((from.k() / kTileK + kTiles - tile) * kTileK);
      fetch_scales(task, piece);
      pieces[num_pieces++] = piece;
      tile += end_tile(piece) - first_tile(piece);
    }
  }

  // Widens the values of a row, of which the first tile of all is at `row`, and the next ones
  // `stride` bytes on.
  CONCLAVE_KERNEL_INLINE void widen(int r, const std::byte* row, int64_t stride) {
    const int64_t num_tiles = end_tile(pieces[num_pieces - 1]) - begin_tile;
    values.widen(r, row + begin_tile * stride, stride, num_tiles);
  }

  // Begins a tile's chains with the tile's k outside a piece, which are multiplied with zeros.
  CONCLAVE_KERNEL_INLINE void begin(int64_t tile, const Piece& piece,
                                    WideChains<kRows>& chains) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      if (__builtin_expect(values.is_finite[r], 1)) continue;
      const Vec beside = Vec::broadcast(sum_beside(r, tile, piece));
#pragma GCC unroll 4
      for (int j = 0; j < kPairVectors; ++j) chains.even.sum[r][j] = beside;
    }
  }

 private:
  // NaN or 0.
  CONCLAVE_KERNEL_INLINE float sum_beside(int row, int64_t tile, const Piece& piece) const {
    float sum = 0;
    for (int64_t k = tile * kTileK; k < (tile + 1) * kTileK; ++k) {
      if (k >= piece.begin && k < piece.end) continue;
      const int64_t pair = k / 2 - begin_tile * kTilePairs;
      sum += 0.0F * (k % 2 == 0 ? values.even[row][pair] : values.odd[row][pair]);
    }
    return sum;
  }
};

// Adds one term of what a piece has of a tile.
template <class Format, int kTerm, int kRows>
CONCLAVE_KERNEL_INLINE void add_wide_tile(const PanelTask& task, const TileBlock<kRows>& block,
                                          const Piece& piece, int64_t tile,
                                          const std::byte* fetched,
                                          Tile<kRows, kPairVectors>& sums) {
  using Decoder = WideDecoder<Format, kTerm>;
  const Decoder decoder;
  const auto load = [&](int64_t pair) __attribute__((always_inline)) {
    return decoder.load(task.panel + pair * 2 * Decoder::kRowBytes);
  };
  const int64_t begin = greater(piece.begin, tile * kTileK);
  const int64_t end = lesser(piece.end, (tile + 1) * kTileK);
  WideChains<kRows> chains(block.values);
  block.begin(tile, piece, chains);
  const int64_t first_pair = block.begin_tile * kTilePairs;
  if (begin % 2 != 0) chains.add_odd(begin / 2 - first_pair, load(begin / 2));
  for (int64_t pair = (begin + 1) / 2; pair < end / 2; ++pair) {
    const auto weights = load(pair);
    if constexpr (kTerm == 0) {
      constexpr int64_t kPairBytes = 2 * Decoder::kRowBytes;
      prefetch_lines<kPairBytes>(fetched + pair * kPairBytes);
    }
    chains.add_even(pair - first_pair, weights);
    chains.add_odd(pair - first_pair, weights);
  }
  if (end % 2 != 0) chains.add_even(end / 2 - first_pair, load(end / 2));
  chains.add_to(sums);
}

// Computes the sums of all pieces of a block. `before` are those of the first piece, if an earlier
// block had its beginning.
template <class Format, int kRows>
void add_wide_block(const PanelTask& task, TileBlock<kRows>& block, const float (*before)[64],
                    const AlongPanel& along) {
  constexpr int64_t kTileBytesOfCodes = kTileK * Format::kBits * 8;
  const SubnormalsAsZeros subnormals;
  for (int64_t p = 0; p < block.num_pieces; ++p) {
    const Piece piece = block.pieces[p];
    Tile<kRows, kPairVectors> sums;
    sums.clear();
    if (!piece.begins) load_wide<kRows>(before, sums);
    for (int64_t tile = first_tile(piece); tile < end_tile(piece); ++tile) {
      const std::byte* const fetched = along.fetched((tile + 1) * kTileBytesOfCodes);
      add_wide_tile<Format, 0>(task, block, piece, tile, fetched, sums);
      if constexpr (quant::kBf16Terms<Format> == 2) {
        add_wide_tile<Format, 1>(task, block, piece, tile, fetched, sums);
      }
    }
    store_wide<kRows>(sums, block.sums[p]);
  }
}

// Adds the sums of a piece that ended to the totals, and keeps those that the next block goes on
// with.
CONCLAVE_KERNEL_INLINE void end_piece(const PanelTask& task, const Piece& piece,
                                      const float (*sums)[64], CodedGroup& group) {
  if (piece.begins) sum_rows(task, piece, group);
  if (piece.ends) return scale_sums(task, piece, sums, group);
  for (int64_t r = 0; r < group.num_rows; ++r) {
    for (int64_t c = 0; c < 64; c += Vec::kLanes) {
      Vec::load(sums[r] + c).store(group.partial.value[r] + c);
    }
  }
}

// Computes all rows of a task that has few.
template <class Format>
struct ComputeWideRows {
  const PanelTask& task;

  template <int kRows>
  CONCLAVE_KERNEL_INLINE void call() const {
    compute<kRows>(task);
  }

 private:
  template <int kRows>
  static void compute(const PanelTask& task) {
    const AlongPanel along(task.panel, task.next_panel, task.k * Format::kBits * 8);
    CodedGroup group;
    begin_group(task, 0, group);
    TileBlock<kRows> block;
    for (Pieces pieces(task); !pieces.done();) {
      block.take(task, pieces);
      for (int r = 0; r < kRows; ++r) {
        if (task.row_scales.first != nullptr) {
          block.widen(r, group.values[r], kTileRowBytes);
        } else {
          block.widen(r, group.rows + r * kTileRowBytes, kTileBytes);
        }
      }
      add_wide_block<Format, kRows>(task, block, group.partial.value, along);
      for (int64_t p = 0; p < block.num_pieces; ++p) {
        end_piece(task, block.pieces[p], block.sums[p], group);
      }
    }
    finish_group(task, 0, kRows, group.total);
  }
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
