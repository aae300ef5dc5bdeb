// Boxes of codes in the order of lanes, 64 columns a turn.
#pragma once

#include "experts/cuda/sm90/codes_in_order.cuh"
#include "experts/cuda/sm90/decode/config.cuh"
#include "experts/cuda/sm90/decode/sums.cuh"
#include "experts/cuda/sm90/factor_steps.cuh"
#include "experts/cuda/sm90/lane_codes.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

inline constexpr int kStepsOfTurn = 4;  // each has 16 columns
// Products of the two halves of a box follow each other, since each waits for the one before it in
// its own half. Turns of a half are a loop but for 16 rows: a launch of few microseconds fetches
// its instructions anew.
inline constexpr int kHalves = 2;
inline constexpr int kTurnsOfHalf = 2;
inline constexpr int kStepsOfHalf = kStepsOfTurn * kTurnsOfHalf;

// The byte of a row in shared memory at which columns 8 chunk + 2 pair and the next lie: lanes of a
// quad find what meets a word of their codes, of 32 columns, in 16 bytes.
__device__ __forceinline__ int lane_place_of(int chunk, int pair) {
  return chunk / 4 * 64 + pair * 16 + chunk % 4 * 4;
}
// The same of one column.
__device__ __forceinline__ int lane_index_of(int column) {
  return lane_place_of(column / 8, column % 8 / 2) / 2 + column % 2;
}

// A lane finds a box here, and its token's row beside it.
struct LaneBox {
  const unsigned char* codes;  // the lane's first row; the second is eight below
  const unsigned char* x;      // the lane's part of the first turn
  int products;                // each has 16 rows
};

// A warp's part of a token's rows, as B operands: those of a turn.
struct LaneRows {
  uint32_t of[kStepsOfTurn][2];

  __device__ __forceinline__ LaneRows(const LaneBox& box, int turn) {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const uint4 both = *reinterpret_cast<const uint4*>(box.x + turn * 128 + word * 64);
      of[2 * word][0] = both.x;
      of[2 * word][1] = both.y;
      of[2 * word + 1][0] = both.z;
      of[2 * word + 1][1] = both.w;
    }
  }
};

// The words of a lane's two rows of a product.
struct LaneWords {
  uint2 of[2];

  // Turns lie in lines of 128 bytes, in whose swizzle they are bits of their own.
  __device__ __forceinline__ LaneWords(const LaneBox& box, const Thread& me, int turn,
                                       int product) {
    const unsigned char* const codes =
        box.codes + product * static_cast<int>(kProductBytes) + lane_chunk(me, turn);
    of[0] = *reinterpret_cast<const uint2*>(codes);
    of[1] = *reinterpret_cast<const uint2*>(codes + 1024);
  }
  __device__ __forceinline__ uint32_t get(int row, int word) const {
    return word == 0 ? of[row].x : of[row].y;
  }

 private:
  static __device__ __forceinline__ int lane_chunk(const Thread& me, int turn) {
    return ((2 * turn + me.quad / 2) ^ me.row) * 16 + me.quad % 2 * 8;
  }
};

// The A operands of the two steps that a word has.
struct LaneWeights {
  uint32_t of[2][4];

  __device__ __forceinline__ void set(int row, const uint32_t (&weights)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) of[i / 2][i % 2 * 2 + row] = weights[i];
  }
};

template <class Config>
__device__ __forceinline__ void multiply_step(float (&sums)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[2]) {
  Config::multiply(sums, a[0], a[1], a[2], a[3], b[0], b[1]);
}

// Whether a box has no product `p`: loops over 2 have both, loops over 4 three or all.
template <int kProducts>
__device__ __forceinline__ bool is_past(const LaneBox& box, int p) {
  return p > kProducts / 2 && p >= box.products;
}

// The values of codes in pairs, which the block's table has for each lane.
class PairValues {
 public:
  __device__ __forceinline__ PairValues(const Shared& shared, const Thread& me)
      : own_(reinterpret_cast<const unsigned char*>(shared.values) + 4 * me.lane) {}

  template <int kTerm = 0>
  __device__ __forceinline__ void of_word(uint32_t word, uint32_t (&values)[4]) const {
    values[0] = look_up<kTerm>(word << 7 & 0x7f80U);
#pragma unroll
    for (int i = 1; i < 4; ++i) values[i] = look_up<kTerm>(word >> (8 * i - 7) & 0x7f80U);
  }

 private:
  template <int kTerm>
  __device__ __forceinline__ uint32_t look_up(uint32_t offset) const {
    return *reinterpret_cast<const uint32_t*>(own_ + kTerm * 256 * 128 + offset);
  }

  const unsigned char* own_;
};

// Weights that bf16 holds. `scales` are those of the box's first group, of the lane's first row,
// and `stride` bytes lie between groups.
template <class Config, int kProducts, class Mode>
__device__ __forceinline__ void multiply_exact(const LaneBox& box, const unsigned char* scales,
                                               int stride, const Thread& me,
                                               Sums<Config, kProducts>& sums) {
  using Lane = LaneCodes<Config::kCodes.powers, Mode::kNear>;
  constexpr int kScalesOfTurn = kStepsOfTurn / Lane::kStepsOfScale;
  constexpr int kChains = Sums<Config, kProducts>::kChains;
  constexpr int kUnrolledTurns = kProducts == 1 ? kTurnsOfHalf : 1;
#pragma unroll kUnrolledTurns
  for (int of_half = 0; of_half < kTurnsOfHalf; ++of_half) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int turn = half * kTurnsOfHalf + of_half;
      const LaneRows b(box, turn);
#pragma unroll
      for (int p = 0; p < kProducts; ++p) {
        if (is_past<kProducts>(box, p)) break;
        const LaneWords words(box, me, turn, p);
        const unsigned char* const of_turn = scales + turn * kScalesOfTurn * stride + p * 16;
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          LaneWeights a;
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const unsigned char* const own =
                of_turn + 8 * row + word * (kScalesOfTurn / 2) * stride;
            const uint32_t first = Lane::scale_of(own[0]);
            const uint32_t second = Config::kCodes.powers ? first : Lane::scale_of(own[stride]);
            uint32_t weights[4];
            Lane::weights_of(words.get(row, word), first, second, weights);
            a.set(row, weights);
          }
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            multiply_step<Config>(sums.chain[p][half % kChains], a.of[step], b.of[2 * word + step]);
          }
        }
      }
    }
  }
}

// Boxes of a matrix have these in common, so that loops over boxes are chosen by them.
template <bool kNearScales>
struct ScaleMode {
  static constexpr bool kNear = kNearScales;  // ByteForm::kNear
};
template <bool kHasZeros, bool kHasLongGroups>
struct NumberMode {
  static constexpr bool kZeros = kHasZeros;
  static constexpr bool kLong = kHasLongGroups;
};

// Scales of the box's first group, of the lane's first row, and its offsets, or zero points or
// null.
struct NumberFactors {
  // FactorForm::kSteps has these instead: steps of the box's first group, and the box's units.
  const uint16_t* step_pairs;
  const float2* step_units;
  const float* scales;
  const float* offsets;
  const uint16_t* zeros;  // bf16
  int rows;               // from a group's factors to the next's
  int steps;              // a group has so many, of 16 columns each, two or more
};

// Rows of tokens 2 q and 2 q + 1 add up to this over the columns of a word, in units of sums.
template <class Config>
__device__ __forceinline__ float2 sums_of_rows(const LaneRows& b, int word) {
  constexpr uint32_t kOnes = 0x3f803f80U;
  const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
  float sums[4] = {};
#pragma unroll
  for (int step = 0; step < 2; ++step) multiply_step<Config>(sums, ones, b.of[2 * word + step]);
  return {sums[0] / CodesInOrder::kUnit, sums[1] / CodesInOrder::kUnit};
}

// Gives the numbers of two rows of a quad, which lanes 2 `of` and 2 `of` + 1 of it have.
__device__ __forceinline__ float2 of_rows_in_quad(float own, int of) {
  constexpr unsigned kWarp = 0xffffffffU;
  return {__shfl_sync(kWarp, own, 2 * of, 4), __shfl_sync(kWarp, own, 2 * of + 1, 4)};
}

// Numbers in their order. Where columns of a half have factors in common, sums of them are scaled;
// else those of 32 columns are.
template <class Config, int kProducts, class Mode, class Numbers>
__device__ __forceinline__ void multiply_numbers(const LaneBox& box, const NumberFactors& factors,
                                                 const Numbers& numbers, const Thread& me,
                                                 Sums<Config, kProducts>& sums) {
  constexpr bool kZeros = Mode::kZeros;
  constexpr bool kLong = Mode::kLong;
  const int shift = __ffs(factors.steps) - 1;
  const auto group_of = [&](int turn, int word) {
    const int steps = turn * kStepsOfTurn + 2 * word;
    return (steps >> shift) * factors.rows;
  };
  // These are of the lane's first and second row.
  const auto scales_of = [&](int p, int group) {
    const int first = group + p * 16;
    return float2{factors.scales[first], factors.scales[first + 8]};
  };
  const auto offsets_of = [&](int p, int group) {
    const int first = group + p * 16;
    return float2{factors.offsets[first], factors.offsets[first + 8]};
  };
  const auto add = [&](int p, float2 scales, const float(&partial)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums.chain[p][0][i] = fmaf(partial[i], i < 2 ? scales.x : scales.y, sums.chain[p][0][i]);
    }
  };
  const auto take_offsets = [&](int p, float2 offsets, float2 of_rows) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums.chain[p][0][i] = fmaf(i % 2 == 0 ? of_rows.x : of_rows.y,
                                 i < 2 ? -offsets.x : -offsets.y, sums.chain[p][0][i]);
    }
  };
  // Instructions come from memory too: only what has results of its own is unrolled.
  constexpr int kUnrolled = kLong ? kHalves : 1;
  constexpr int kUnrolledTurns = kLong && kProducts == 1 ? kTurnsOfHalf : 1;
  float of_halves[kHalves][kLong ? kProducts : 1][4] = {};
#pragma unroll kUnrolledTurns
  for (int of_half = 0; of_half < kTurnsOfHalf; ++of_half) {
#pragma unroll kUnrolled
    for (int half = 0; half < kHalves; ++half) {
      const int turn = half * kTurnsOfHalf + of_half;
      const LaneRows b(box, turn);
      float2 of_rows[2] = {};
      if constexpr (Config::kCodes.offsets) {
#pragma unroll
        for (int word = 0; word < 2; ++word) of_rows[word] = sums_of_rows<Config>(b, word);
      }
#pragma unroll
      for (int p = 0; p < kProducts; ++p) {
        if (is_past<kProducts>(box, p)) break;
        const LaneWords words(box, me, turn, p);
        float2 of_quad = {};
        if constexpr (Config::kCodes.steps) {
          // The four lanes of a quad need the same numbers, of two rows and words: each makes those
          // of one of them.
          const int own = p * 16 + me.quad % 2 * 8;
          of_quad = of_steps(factors.step_pairs[group_of(turn, me.quad / 2) + own],
                             factors.step_units[own]);
        }
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          const int group = group_of(turn, word);
          LaneWeights a;
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            uint32_t values[4];
            numbers.of_word(words.get(row, word), values);
            if constexpr (kZeros) {
              const uint32_t zero = CodesInOrder::zero_of(factors.zeros[group + p * 16 + 8 * row]);
#pragma unroll
              for (uint32_t& value : values) {
                asm("sub.rn.bf16x2 %0, %0, %1;" : "+r"(value) : "r"(zero));
              }
            }
            a.set(row, values);
          }
          float of_word[4] = {};
          float(&partial)[4] = kLong ? of_halves[half][kLong ? p : 0] : of_word;
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            multiply_step<Config>(partial, a.of[step], b.of[2 * word + step]);
          }
          if constexpr (Config::kCodes.terms == 2) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              uint32_t values[4];
              numbers.template of_word<1>(words.get(row, word), values);
              a.set(row, values);
            }
#pragma unroll
            for (int step = 0; step < 2; ++step) {
              multiply_step<Config>(partial, a.of[step], b.of[2 * word + step]);
            }
          }
          if constexpr (Config::kCodes.steps) {
            add(p, of_rows_in_quad(of_quad.x, word), of_word);
            take_offsets(p, of_rows_in_quad(of_quad.y, word), of_rows[word]);
          } else {
            if constexpr (!kLong) add(p, scales_of(p, group), of_word);
            if constexpr (Config::kCodes.offsets) {
              take_offsets(p, offsets_of(p, group), of_rows[word]);
            }
          }
        }
      }
    }
  }
  if constexpr (kLong) {
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
      if (is_past<kProducts>(box, p)) break;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        add(p, scales_of(p, group_of(half * kTurnsOfHalf, 0)), of_halves[half][p]);
      }
    }
  }
}

}  // namespace conclave::inline v0::experts::decode
