// Rows of bf16 times one packed panel of codes with scales, by dot products of pairs. Rows are
// plain, or have the values of codes, which are exact.
//
// Codes are exact in bf16, or the sum of two terms that are; the sum over the k that share a scale
// is scaled as a whole: total + sum(x * code) * scale, of rows of codes first by theirs. Offsets
// are taken off later (pair_sums-inl.h). The first rows decode codes as they need them, and leave
// what they decoded to the others, strip by strip.
#pragma once

#include "gemm/cpu/coded_pieces-inl.h"
#include "gemm/cpu/finish-inl.h"
#include "gemm/cpu/micro_kernel-inl.h"
#include "gemm/cpu/pair_sums-inl.h"
#include "quant/formats.h"

#include "conclave/dtype.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Rows that share a strip, and whose sums lie beside it; no block of a work list has more.
inline constexpr int64_t kMaxPairedRows = 96;
// Pairs between two turns of fetching the next panel.
inline constexpr int64_t kPairsPerTurn = 8;

template <int kRows>
struct PairTile : Tile<kRows, kPairVectors> {
  CONCLAVE_KERNEL_INLINE void load(const float (*sums)[64]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kPairVectors; ++j) {
        this->sum[r][j] = Vec::load(sums[r] + j * Vec::kLanes);
      }
    }
  }
  CONCLAVE_KERNEL_INLINE void store(float (*sums)[64]) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kPairVectors; ++j) this->sum[r][j].store(sums[r] + j * Vec::kLanes);
    }
  }
};

template <int kRows>
struct Bf16Rows {
  const uint16_t* values[kRows];
  const float* scales[kRows];  // null for plain rows

  CONCLAVE_KERNEL_INLINE Bf16Rows(const PanelTask& task, int64_t first_row) {
    for (int r = 0; r < kRows; ++r) {
      const int64_t slot = first_row + r;
      const int64_t row = task.row_index != nullptr ? task.row_index[slot] : slot;
      values[r] = reinterpret_cast<const uint16_t*>(task.rows + row * task.row_bytes);
      scales[r] =
          task.row_scales.first == nullptr ? nullptr : task.row_scales.of_row(row, task.row_bytes);
    }
  }
};

// Decoded weights: 32 KiB for each term, most of the first-level cache. Smaller strips pay more
// loop overhead; larger ones fall out of that cache.
template <class Format>
struct PairStrip {
  static constexpr int64_t kPairs = 128;

  alignas(64) uint32_t weights[quant::kBf16Terms<Format>][kPairs][64];
  Piece pieces[kPairs];
  int64_t num_pieces = 0;
};

// The sums of rows: of a piece that the next strip continues, of all pieces that ended, and of the
// rows' own values.
template <int64_t kRows>
struct PairSums {
  alignas(64) float partial[kRows][64];
  alignas(64) float total[kRows][64];
  alignas(64) float of_groups[kRows][kSumsTogether];
};
struct SumPointers {
  float (*partial)[64];
  float (*total)[64];
  float (*of_groups)[kSumsTogether];

  template <int64_t kRows>
  CONCLAVE_KERNEL_INLINE SumPointers(PairSums<kRows>& sums, int64_t row)
      : partial(sums.partial + row), total(sums.total + row), of_groups(sums.of_groups + row) {}
};

// Adds a pair of which a piece has one k only. It is rare, and out of line so that it takes no
// registers from the loop over the others.
template <int kTerm, int kRows, class Weights>
__attribute__((noinline)) void add_edge_in_memory(const Weights& weights,
                                                  const Bf16Rows<kRows>& rows, int64_t pair,
                                                  PairTile<kRows>& sums) {
  PairTile<kRows> tile = sums;
  const PairRow pairs = weights.template edge<kTerm>(pair);
  Bf16DotWeights::add_pairs(tile, rows.values, 2 * pair, pairs.of);
  sums = tile;
}
template <int kTerm, int kRows, class Weights>
CONCLAVE_KERNEL_INLINE void add_edge(const Weights& weights, const Bf16Rows<kRows>& rows,
                                     int64_t pair, PairTile<kRows>& tile) {
  PairTile<kRows> sums = tile;
  add_edge_in_memory<kTerm>(weights, rows, pair, sums);
  tile = sums;
}

// Adds one term of the pairs of a piece, one by one.
template <int kTerm, int kRows, class Weights>
CONCLAVE_KERNEL_INLINE void add_term(const Piece& piece, const Weights& weights,
                                     const Bf16Rows<kRows>& rows, PairTile<kRows>& tile) {
  if constexpr (Weights::kHasEdges) {
    if (piece.begin % 2 != 0) add_edge<kTerm>(weights, rows, piece.first_pair(), tile);
  }
  for (int64_t pair = weights.first(piece); pair < weights.end(piece); ++pair) {
    const PairRow pairs = weights.template whole<kTerm>(pair);
    Bf16DotWeights::add_pairs(tile, rows.values, 2 * pair, pairs.of);
  }
  if constexpr (Weights::kHasEdges) {
    if (piece.end % 2 != 0) add_edge<kTerm>(weights, rows, piece.end_pair() - 1, tile);
  }
}

// Adds a piece to the sums of some rows, term by term.
template <int kTerms, int kRows, class Weights>
CONCLAVE_KERNEL_INLINE void add_piece(const PanelTask& task, const Piece& piece,
                                      const Bf16Rows<kRows>& rows, const Weights& weights,
                                      const SumPointers& sums) {
  if (task.offsets.exist() && piece.begins) {
    for (int r = 0; r < kRows; ++r) {
      sum_next_groups(task, piece, {rows.values[r], 32}, sums.of_groups[r]);
    }
  }
  PairTile<kRows> tile;
  if (piece.begins) {
    tile.clear();
  } else {
    tile.load(sums.partial);
  }
  add_term<0>(piece, weights, rows, tile);
  if constexpr (kTerms == 2) add_term<1>(piece, weights, rows, tile);
  if (!piece.ends) {
    tile.store(sums.partial);
    return;
  }
  const PieceNumbers numbers(task, piece);
  if (task.row_scales.first != nullptr) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      add_group_of_codes(piece, numbers, tile.sum[r], rows.scales[r], sums.total[r]);
    }
    return;
  }
  if (!task.offsets.exist()) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      add_group<false>(piece, numbers, tile.sum[r], nullptr, sums.total[r]);
    }
    return;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    add_group<true>(piece, numbers, tile.sum[r], sums.of_groups[r], sums.total[r]);
  }
}

template <class Format>
struct PairDecoders {
  PairDecoder<Format, 0> first;
  PairDecoder<Format, quant::kBf16Terms<Format> - 1> second;

  template <int kTerm>
  CONCLAVE_KERNEL_INLINE PairRow load(const std::byte* codes) const {
    if constexpr (kTerm == 0) return first.load(codes);
    return second.load(codes);
  }
};

// The pairs of a piece, decoded when they are asked for, and with kKeep left in a strip.
template <class Format, bool kKeep>
struct DecodedPairs {
  static constexpr int64_t kBytes = PairDecoder<Format, 0>::kPairBytes;
  static constexpr bool kHasEdges = true;

  const PairDecoders<Format>& decoder;
  const std::byte* panel;
  const Piece& piece;
  Ahead& ahead;
  PairStrip<Format>* strip;
  int64_t place;  // where the strip would have pair 0

  template <int kTerm>
  CONCLAVE_KERNEL_INLINE PairRow whole(int64_t pair) const {
    const std::byte* codes = panel + pair * kBytes;
    if constexpr (kTerm == 0) {
      if (pair % kPairsPerTurn == 0) ahead.turn();
      fetch_codes<kBytes>(codes);
    }
    return keep<kTerm>(pair, decoder.template load<kTerm>(codes));
  }
  template <int kTerm>
  CONCLAVE_KERNEL_INLINE PairRow edge(int64_t pair) const {
    PairRow pairs = decoder.template load<kTerm>(panel + pair * kBytes);
    pairs.keep(2 * pair, piece.begin, piece.end);
    return keep<kTerm>(pair, pairs);
  }
  static CONCLAVE_KERNEL_INLINE int64_t first(const Piece& piece) { return piece.first_whole(); }
  static CONCLAVE_KERNEL_INLINE int64_t end(const Piece& piece) { return piece.end_whole(); }

 private:
  template <int kTerm>
  CONCLAVE_KERNEL_INLINE PairRow keep(int64_t pair, const PairRow& pairs) const {
    if constexpr (kKeep) pairs.store(strip->weights[kTerm][place + pair]);
    return pairs;
  }
};

template <class Format>
struct StoredPairs {
  static constexpr bool kHasEdges = false;

  const PairStrip<Format>& strip;
  int64_t place;  // where it would have pair 0

  template <int kTerm>
  CONCLAVE_KERNEL_INLINE PairRow whole(int64_t pair) const {
    return PairRow::load(strip.weights[kTerm][place + pair]);
  }
  static CONCLAVE_KERNEL_INLINE int64_t first(const Piece& piece) { return piece.first_pair(); }
  static CONCLAVE_KERNEL_INLINE int64_t end(const Piece& piece) { return piece.end_pair(); }
};

// Decodes the next pieces, up to the `pairs` of a strip, for the first rows of a task. With
// kKeep, the strip takes them for the others.
template <class Format, int kRows, bool kKeep>
void decode_and_add(const PanelTask& task, const Bf16Rows<kRows>& rows, Pieces& pieces,
                    Ahead& ahead, PairStrip<Format>* strip, const SumPointers& sums) {
  constexpr int kTerms = quant::kBf16Terms<Format>;
  const PairDecoders<Format> decoder;
  int64_t at = 0;
  if constexpr (kKeep) strip->num_pieces = 0;
  // Terms are added one after the other up to the end of a strip, so that all rows end there.
  constexpr bool kByStrips = kKeep || kTerms == 2;
  while (!pieces.done() && (!kByStrips || at < PairStrip<Format>::kPairs)) {
    const int64_t room = kByStrips ? 2 * (pieces.k() / 2 + PairStrip<Format>::kPairs - at) : task.k;
    const Piece piece = pieces.take(room);
    if constexpr (kKeep) strip->pieces[strip->num_pieces++] = piece;
    fetch_scales(task, piece);
    const DecodedPairs<Format, kKeep> weights{
        decoder, task.panel, piece, ahead, kKeep ? strip : nullptr, at - piece.first_pair()};
    add_piece<kTerms>(task, piece, rows, weights, sums);
    at += piece.end_pair() - piece.first_pair();
  }
}

// Adds a strip to the sums of some rows.
template <class Format, int kRows>
void add_strip(const PanelTask& task, const PairStrip<Format>& strip, int64_t first_row,
               const SumPointers& sums) {
  const Bf16Rows<kRows> rows(task, first_row);
  int64_t at = 0;
  for (int64_t p = 0; p < strip.num_pieces; ++p) {
    const Piece piece = strip.pieces[p];
    const StoredPairs<Format> weights{strip, at - piece.first_pair()};
    add_piece<quant::kBf16Terms<Format>>(task, piece, rows, weights, sums);
    at += piece.end_pair() - piece.first_pair();
  }
}

template <class Format>
struct AddStrip {
  const PanelTask& task;
  const PairStrip<Format>& strip;
  int64_t first_row;
  SumPointers sums;

  template <int kRows>
  CONCLAVE_KERNEL_INLINE void call() const {
    add_strip<Format, kRows>(task, strip, first_row, sums);
  }
};

// Rows that decode for all: more would not leave the registers that tables of bytes take.
template <class Format>
inline constexpr int kDecodingRows = Format::kBits == 4 ? 6 : 4;

// Rows [first, first + count), at most kMaxPairedRows and more than decode.
template <class Format>
void compute_paired_strips(const PanelTask& task, int64_t first, int64_t count, Ahead& ahead) {
  constexpr int kFirstRows = kDecodingRows<Format>;
  const Bf16Rows<kFirstRows> first_rows(task, first);
  PairStrip<Format> strip;
  PairSums<kMaxPairedRows> sums;
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t c = 0; c < 64; c += Vec::kLanes) Vec::zero().store(sums.total[r] + c);
  }
  const int64_t others = count - kFirstRows;
  const int64_t tiles = (others + kMaxTileRows - 1) / kMaxTileRows;
  for (Pieces pieces(task); !pieces.done();) {
    decode_and_add<Format, kFirstRows, true>(task, first_rows, pieces, ahead, &strip, {sums, 0});
    for (int64_t t = 0, row = kFirstRows; t < tiles; ++t) {
      const int64_t rows = others / tiles + (t < others % tiles ? 1 : 0);
      call_for<kMaxTileRows>(rows, AddStrip<Format>{task, strip, first + row, {sums, row}});
      row += rows;
    }
  }
  finish_tile(task, {.sums = sums.total[0],
                     .first_row = first,
                     .num_rows = count,
                     .out = task.out + first * task.out_row_bytes,
                     .out_row_bytes = task.out_row_bytes,
                     .out_block_bytes = task.out_block_bytes});
}

// Rows [first, first + kRows) decode for themselves.
template <class Format>
struct ComputeFewPairedRows {
  const PanelTask& task;
  int64_t first;
  Ahead& ahead;

  template <int kRows>
  CONCLAVE_KERNEL_INLINE void call() const {
    PairSums<kRows> sums;
    for (auto& row : sums.total) {
      for (int64_t c = 0; c < 64; c += Vec::kLanes) Vec::zero().store(row + c);
    }
    const Bf16Rows<kRows> rows(task, first);
    for (Pieces pieces(task); !pieces.done();) {
      decode_and_add<Format, kRows, false>(task, rows, pieces, ahead, nullptr, {sums, 0});
    }
    finish_tile(task, {.sums = sums.total[0],
                       .first_row = first,
                       .num_rows = kRows,
                       .out = task.out + first * task.out_row_bytes,
                       .out_row_bytes = task.out_row_bytes,
                       .out_block_bytes = task.out_block_bytes});
  }
};

// A PanelFunction for rows of bf16.
template <class Format>
void compute_paired_panel(const PanelTask& task) noexcept {
  constexpr int kFew = kDecodingRows<Format>;
  const int64_t blocks = (task.num_rows + kMaxPairedRows - 1) / kMaxPairedRows;
  const int64_t turns = task.k / (2 * kPairsPerTurn) + 1;
  Ahead ahead = fetch_panel(task, turns, blocks);
  for (int64_t first = 0; first < task.num_rows; first += kMaxPairedRows) {
    const int64_t count = lesser(kMaxPairedRows, task.num_rows - first);
    if (count <= kFew) {
      call_for<kFew>(count, ComputeFewPairedRows<Format>{task, first, ahead});
    } else {
      compute_paired_strips<Format>(task, first, count, ahead);
    }
  }
}

// The product for weights of one of the formats; null if they are of another.
template <class... Formats>
PanelFunction paired_product(DType weights, quant::FormatList<Formats...>) noexcept {
  PanelFunction product = nullptr;
  ((weights == Formats::kElement ? void(product = &compute_paired_panel<Formats>) : void()), ...);
  return product;
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
