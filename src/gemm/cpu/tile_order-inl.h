// Few rows of bf16 times one packed panel of codes, on vectors, with the bits that tiles give.
//
// A tile takes as long for one row as for sixteen, and its weights go through memory; here they
// stay in registers. What a tile adds to a sum for 32 k is `even + odd`: two chains of fused
// multiply-adds, over its even and its odd k, each from zero. Subnormal numbers are zeros there.
// The weights of other scales among the 32 are zeros, which make NaN of infinite values.
#pragma once

#include "gemm/cpu/coded_groups-inl.h"
#include "gemm/cpu/panel_codes-inl.h"
#include "gemm/cpu/weights-inl.h"
#include "quant/code_values.h"

#include <xmmintrin.h>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Subnormal numbers are zeros, in operands and results, of what reads and writes memory meanwhile.
class SubnormalsAsZeros {
 public:
  CONCLAVE_KERNEL_INLINE SubnormalsAsZeros() : before_(_mm_getcsr()) {
    constexpr unsigned kOperands = 0x0040;
    constexpr unsigned kResults = 0x8000;
    _mm_setcsr(before_ | kOperands | kResults);
    settle_memory();
  }
  CONCLAVE_KERNEL_INLINE ~SubnormalsAsZeros() {
    settle_memory();
    _mm_setcsr(before_);
  }
  SubnormalsAsZeros(const SubnormalsAsZeros&) = delete;
  SubnormalsAsZeros& operator=(const SubnormalsAsZeros&) = delete;

 private:
  unsigned before_;
};

// Codes of two neighbouring k as float32.
struct EvenAndOdd {
  Vec even[kPairVectors];
  Vec odd[kPairVectors];
};

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

// Floats of 8 bits, by tables of pairs.
template <class Format, int kTerm>
  requires(quant::has_sign_bit<Format>())
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

// Some pieces of k: the rows' values there, as float32, and the sums of each piece.
template <int kRows>
struct TileBlock {
  static constexpr int64_t kTiles = 16;

  alignas(64) float even[kRows][kTiles * kTilePairs];
  alignas(64) float odd[kRows][kTiles * kTilePairs];
  alignas(64) float sums[kTiles][kRows][64];
  Piece pieces[kTiles];
  int64_t num_pieces = 0;
  int64_t begin_tile = 0;
  bool is_finite[kRows];

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

  // Widens the values of a row, of which the first tile is at `values`, and the next ones `stride`
  // bytes on.
  CONCLAVE_KERNEL_INLINE void widen(int row, const std::byte* values, int64_t stride) {
    const int64_t tiles = end_tile(pieces[num_pieces - 1]) - begin_tile;
    Vec nothing = Vec::zero();
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const std::byte* const from = values + (begin_tile + tile) * stride;
      for (int64_t pair = 0; pair < kTilePairs; pair += Vec::kLanes) {
        const Vec pairs = Vec::load(from + pair * 4);
        const int64_t at = tile * kTilePairs + pair;
        pairs.bf16_first().store(even[row] + at);
        pairs.bf16_second().store(odd[row] + at);
        nothing = Vec::fma(pairs.bf16_first(), Vec::zero(), nothing);
        nothing = Vec::fma(pairs.bf16_second(), Vec::zero(), nothing);
      }
    }
    float lanes[Vec::kLanes];
    nothing.store(lanes);
    is_finite[row] = true;
    for (const float lane : lanes) is_finite[row] = is_finite[row] && lane == 0.0F;
  }

  // The tile's k outside a piece are multiplied with zeros: returns their sum, NaN or 0.
  CONCLAVE_KERNEL_INLINE float beside(int row, int64_t tile, const Piece& piece) const {
    float sum = 0;
    if (__builtin_expect(is_finite[row], 1)) return sum;
    for (int64_t k = tile * kTileK; k < (tile + 1) * kTileK; ++k) {
      if (k >= piece.begin && k < piece.end) continue;
      const int64_t pair = k / 2 - begin_tile * kTilePairs;
      sum += 0.0F * (k % 2 == 0 ? even[row][pair] : odd[row][pair]);
    }
    return sum;
  }
};

// Rows that are computed so: more are as fast on tiles, or faster.
inline constexpr int kMaxWideRows = 2;
static_assert(kMaxWideRows <= kMostNarrowRows);

// The two chains of a tile.
template <int kRows>
struct WideChains {
  const float* even_values[kRows];
  const float* odd_values[kRows];
  int64_t first_pair;  // values of the block begin there
  Tile<kRows, kPairVectors> even;
  Tile<kRows, kPairVectors> odd;

  // Begins with what the rest of tile `tile` makes.
  CONCLAVE_KERNEL_INLINE WideChains(const TileBlock<kRows>& block, int64_t tile, const Piece& piece)
      : first_pair(block.begin_tile * kTilePairs) {
    odd.clear();
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      even_values[r] = block.even[r];
      odd_values[r] = block.odd[r];
      const Vec beside = Vec::broadcast(block.beside(r, tile, piece));
#pragma GCC unroll 4
      for (int j = 0; j < kPairVectors; ++j) even.sum[r][j] = beside;
    }
  }
  CONCLAVE_KERNEL_INLINE void add_even(int64_t pair, const EvenAndOdd& weights) {
    even.multiply_add_with(
        even_values,
        pair - first_pair, [&](int j) __attribute__((always_inline)) { return weights.even[j]; });
  }
  CONCLAVE_KERNEL_INLINE void add_odd(int64_t pair, const EvenAndOdd& weights) {
    odd.multiply_add_with(
        odd_values,
        pair - first_pair, [&](int j) __attribute__((always_inline)) { return weights.odd[j]; });
  }
  CONCLAVE_KERNEL_INLINE void add_to(Tile<kRows, kPairVectors>& sums) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kPairVectors; ++j) {
        sums.sum[r][j] = Vec::add(sums.sum[r][j], Vec::add(even.sum[r][j], odd.sum[r][j]));
      }
    }
  }
};

// Adds one term of what a piece has of a tile.
template <class Format, int kTerm, int kRows>
CONCLAVE_KERNEL_INLINE void add_wide_tile(const PanelTask& task, const TileBlock<kRows>& block,
                                          const Piece& piece, int64_t tile,
                                          Tile<kRows, kPairVectors>& sums) {
  using Decoder = WideDecoder<Format, kTerm>;
  const Decoder decoder;
  const auto load = [&](int64_t pair) __attribute__((always_inline)) {
    return decoder.load(task.panel + pair * 2 * Decoder::kRowBytes);
  };
  const int64_t begin = greater(piece.begin, tile * kTileK);
  const int64_t end = lesser(piece.end, (tile + 1) * kTileK);
  WideChains<kRows> chains(block, tile, piece);
  if (begin % 2 != 0) chains.add_odd(begin / 2, load(begin / 2));
  for (int64_t pair = (begin + 1) / 2; pair < end / 2; ++pair) {
    const auto weights = load(pair);
    chains.add_even(pair, weights);
    chains.add_odd(pair, weights);
  }
  if (end % 2 != 0) chains.add_even(end / 2, load(end / 2));
  chains.add_to(sums);
}

// Computes the sums of all pieces of a block. `before` are those of the first piece, if an earlier
// block had its beginning.
template <class Format, int kRows>
void add_wide_block(const PanelTask& task, TileBlock<kRows>& block, const float (*before)[64],
                    Ahead& ahead) {
  constexpr int64_t kRowBytes = Format::kBits * 8;
  const SubnormalsAsZeros subnormals;
  for (int64_t p = 0; p < block.num_pieces; ++p) {
    const Piece piece = block.pieces[p];
    Tile<kRows, kPairVectors> sums;
    sums.clear();
    if (!piece.begins) {
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < kPairVectors; ++j) {
          sums.sum[r][j] = Vec::load(before[r] + j * Vec::kLanes);
        }
      }
    }
    for (int64_t tile = first_tile(piece); tile < end_tile(piece); ++tile) {
      ahead.turn();
      fetch_codes<kTileK * kRowBytes>(task.panel + tile * kTileK * kRowBytes);
      add_wide_tile<Format, 0>(task, block, piece, tile, sums);
      if constexpr (quant::kBf16Terms<Format> == 2) {
        add_wide_tile<Format, 1>(task, block, piece, tile, sums);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kPairVectors; ++j) {
        sums.sum[r][j].store(block.sums[p][r] + j * Vec::kLanes);
      }
    }
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
    Ahead ahead = fetch_panel<Format>(task, task.k / kTileK + 1, 1);
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
      add_wide_block<Format, kRows>(task, block, group.partial.value, ahead);
      for (int64_t p = 0; p < block.num_pieces; ++p) {
        end_piece(task, block.pieces[p], block.sums[p], group);
      }
    }
    finish_group(task, 0, kRows, group.total);
  }
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
