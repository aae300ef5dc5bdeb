// Boxes of weights that are codes as stored: a table in shared memory makes them bf16, tensor cores
// multiply columns that share a scale, and scales multiply sums.
#pragma once

#include "cuda/device/copy.cuh"
#include "experts/cuda/sm90/codes_in_order.cuh"
#include "experts/cuda/sm90/decode/walk.cuh"
#include "experts/cuda/sm90/factor_steps.cuh"

#include <cstdint>

namespace conclave::inline v0::experts::decode {

// Fills the table, with all consumers. A byte of two codes has the value of the lower one, which is
// the earlier column, in the lower half; a byte of one code has its value there. Second terms
// follow, but of codes as stored, which are listed by code with both terms.
template <class Config>
__device__ __forceinline__ void fill_values(const DecodeParams& params, const Shared& shared) {
  constexpr bool kOfCodes = Config::kCodes.terms == 2 && !Config::kCodes.in_pairs;
  constexpr bool kPairs = Config::kCodes.bits == 4 && !kOfCodes;
  const int pieces = params.plan.value_bytes / 16;
  for (int i = static_cast<int>(threadIdx.x); i < pieces; i += Config::kConsumers) {
    const int entry = i / 8;
    uint32_t value = params.values.of[entry & (kPairs ? 15 : 255)];
    if constexpr (kPairs) {
      value = __byte_perm(value, params.values.of[entry >> 4 & 15],
                          Config::kCodes.terms == 1 || entry < 256 ? 0x5410 : 0x7632);
    } else if constexpr (!kOfCodes) {
      value &= 0xffffU;
    }
    reinterpret_cast<uint4*>(shared.values)[i] = make_uint4(value, value, value, value);
  }
}

// 16 rows of a box times the rows of tokens, 64 columns a turn, which are four products of 16.
// Turns are not unrolled: a launch of few microseconds fetches its instructions anew.
template <class Config>
class CodeBox {
 public:
  static constexpr int kBits = Config::kCodes.bits;
  static constexpr bool kOffsets = Config::kCodes.offsets;
  static constexpr int kTerms = Config::kCodes.terms;
  static constexpr bool kWhole = Config::kCodes.whole;
  static constexpr bool kMayHaveZeros = !kOffsets && !Config::kCodes.steps && kTerms == 1;
  static constexpr int kSteps = 4;  // each has 16 columns
  static constexpr bool kBothInSteps = kOffsets && Config::kCodes.steps;
  static constexpr int kTurns = kDecodeBoxBytes * 8 / kBits / (16 * kSteps);

  // The lane's first of two rows of the box, the row of its token beside the box, or null, and the
  // factors of its first row.
  struct Place {
    const unsigned char* codes;
    const unsigned char* x;
    // Forms in steps have these instead of scales and offsets; both numbers have units if a pair
    // is of both.
    const uint16_t* step_pairs;
    const float* step_units;
    const float* scales;
    const float* offsets;
    const uint16_t* zeros;  // bf16; null if there are none
    int rows;               // from a group's factors to the next's
    int steps;              // a group has so many
  };

  __device__ __forceinline__ CodeBox(const Shared& shared, const Thread& me)
      : values_(reinterpret_cast<const unsigned char*>(shared.values)),
        lane_(static_cast<uint32_t>(me.lane) * 4),
        row_(static_cast<uint32_t>(me.row)),
        quad_(static_cast<uint32_t>(me.quad)) {}

  __device__ __forceinline__ void multiply(const Place& place, float (&sums)[4]) const {
    // Uniform over the grid.
    if (kMayHaveZeros && place.zeros != nullptr) {
      multiply_with<kMayHaveZeros>(place, sums);
    } else {
      multiply_with<false>(place, sums);
    }
  }

 private:
  // Four codes of each step, of the lane's first and second row.
  struct Codes {
    uint32_t of[kSteps][2];
  };
  struct Rows {
    uint32_t of[kSteps][2];
  };
  // Sums of products with the same factors, and of the rows alone, which offsets multiply.
  struct Chain {
    float products[4] = {};
    float rows[kOffsets ? 4 : 1] = {};
  };

  template <bool kZeros>
  __device__ __forceinline__ void multiply_with(const Place& place, float (&sums)[4]) const {
    if (place.steps == 1) {
      multiply_turns<true, kZeros>(place, sums);
    } else {
      multiply_turns<false, kZeros>(place, sums);
    }
  }

  // If factors change with every step, lanes of a quad have four neighbouring columns of each step;
  // else codes of 4 bits are loaded faster as eight columns of two steps.
  template <bool kFine, bool kZeros>
  __device__ __forceinline__ void multiply_turns(const Place& place, float (&sums)[4]) const {
    constexpr int kChains = kFine ? kSteps : 2;
    const int shift = __ffs(place.steps) - 1;
    Codes codes;
    load_codes<kFine>(place, 0, codes);
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      const Codes now = codes;
      Rows rows;
      load_rows<kFine>(place, turn, rows);
      if (turn + 1 < kTurns) load_codes<kFine>(place, turn + 1, codes);
      Chain chain[kChains];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int group = (turn * kSteps + step) >> shift;
        add_step<kZeros>(now.of[step], rows.of[step], place, group, chain[step * kChains / kSteps]);
      }
#pragma unroll
      for (int c = 0; c < kChains; ++c) {
        const int group = (turn * kSteps + c * (kSteps / kChains)) >> shift;
        promote(place, group, chain[c], sums);
      }
    }
  }

  // The 16 bytes of number `chunk` in a row.
  __device__ __forceinline__ const unsigned char* line(const Place& place, int chunk, int i) const {
    return place.codes + i * 1024 + ((static_cast<uint32_t>(chunk) ^ row_) << 4);
  }

  template <bool kFine>
  __device__ __forceinline__ void load_codes(const Place& place, int turn, Codes& codes) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kBits == 8) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          codes.of[step][i] =
              *reinterpret_cast<const uint32_t*>(line(place, kSteps * turn + step, i) + 4 * quad_);
        }
      } else {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const unsigned char* const chunk = line(place, 2 * turn + pair, i);
          if constexpr (kFine) {
            codes.of[2 * pair][i] = *reinterpret_cast<const uint16_t*>(chunk + 2 * quad_);
            codes.of[2 * pair + 1][i] = *reinterpret_cast<const uint16_t*>(chunk + 8 + 2 * quad_);
          } else {
            const uint32_t word = *reinterpret_cast<const uint32_t*>(chunk + 4 * quad_);
            codes.of[2 * pair][i] = word;
            codes.of[2 * pair + 1][i] = word >> 16;
          }
        }
      }
    }
  }

  template <bool kFine>
  __device__ __forceinline__ void load_rows(const Place& place, int turn, Rows& rows) const {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const unsigned char* const x = place.x + turn * 128 + pair * 64;
      uint4 both = {};
      if (place.x != nullptr) {
        if constexpr (kFine || kBits == 8) {
          const uint2 first = *reinterpret_cast<const uint2*>(x + 8 * quad_);
          const uint2 second = *reinterpret_cast<const uint2*>(x + 32 + 8 * quad_);
          both = {first.x, first.y, second.x, second.y};
        } else {
          both = *reinterpret_cast<const uint4*>(x + 16 * quad_);
        }
      }
      rows.of[2 * pair][0] = both.x;
      rows.of[2 * pair][1] = both.y;
      rows.of[2 * pair + 1][0] = both.z;
      rows.of[2 * pair + 1][1] = both.w;
    }
  }

  __device__ __forceinline__ uint32_t look_up(uint32_t offset) const {
    return *reinterpret_cast<const uint32_t*>(values_ + (offset | lane_));
  }

  // The values of columns 2 i and 2 i + 1 of a lane's four.
  __device__ __forceinline__ uint32_t values_of(uint32_t codes, int i) const {
    if constexpr (kBits == 4) {
      return look_up((i == 0 ? codes << 7 : codes >> 1) & 0x7f80U);
    } else if constexpr (kWhole) {
      return numbers_of_bytes(i == 0 ? codes : codes >> 16);
    } else {
      const uint32_t low = look_up((i == 0 ? codes << 7 : codes >> 9) & 0x7f80U);
      return __byte_perm(low, look_up((i == 0 ? codes >> 1 : codes >> 17) & 0x7f80U), 0x5410);
    }
  }

  // In both halves, and in the unit of values.
  static __device__ __forceinline__ uint32_t zero_of(uint16_t zero) {
    return kWhole ? CodesInOrder::zero_of(zero) : zero * 0x10001U;
  }
  static __device__ __forceinline__ uint32_t shifted(uint32_t values, uint32_t zero) {
    asm("sub.rn.bf16x2 %0, %0, %1;" : "+r"(values) : "r"(zero));
    return values;
  }

  template <bool kZeros>
  __device__ __forceinline__ void add_step(const uint32_t (&codes)[2], const uint32_t (&b)[2],
                                           const Place& place, int group, Chain& chain) const {
    if constexpr (kTerms == 2) {
      uint32_t first[4];
      uint32_t second[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t byte = i / 2 == 0 ? codes[i % 2] : codes[i % 2] >> 8;
        const uint32_t low = look_up(byte << 7 & 0x780U);
        const uint32_t high = look_up(byte << 3 & 0x780U);
        first[i] = __byte_perm(low, high, 0x5410);
        second[i] = __byte_perm(low, high, 0x7632);
      }
      Config::multiply(chain.products, first[0], first[1], first[2], first[3], b[0], b[1]);
      Config::multiply(chain.products, second[0], second[1], second[2], second[3], b[0], b[1]);
    } else {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = values_of(codes[i % 2], i / 2);
      if constexpr (kZeros) {
        const uint16_t* const zeros = place.zeros + group * place.rows;
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = shifted(a[i], zero_of(zeros[i % 2 * 8]));
      }
      Config::multiply(chain.products, a[0], a[1], a[2], a[3], b[0], b[1]);
    }
    if constexpr (kOffsets) {
      constexpr uint32_t kOnes = 0x3f803f80U;
      Config::multiply(chain.rows, kOnes, kOnes, kOnes, kOnes, b[0], b[1]);
    }
  }

  // The factors of the lane's second row, which is row 1, lie eight numbers behind those of row 0.
  static __device__ __forceinline__ float scale_of(const Place& place, int group, int row) {
    if constexpr (kBothInSteps) {
      return of_step(place.step_pairs[group * place.rows + row * 8], 0, place.step_units[row * 16]);
    } else if constexpr (Config::kCodes.steps) {
      const uint32_t pair = place.step_pairs[group / 2 * place.rows + row * 8];
      return of_step(pair, group % 2, place.step_units[row * 8]);
    } else {
      return place.scales[group * place.rows + row * 8];
    }
  }
  static __device__ __forceinline__ float offset_of(const Place& place, int group, int row) {
    if constexpr (kBothInSteps) {
      return of_step(place.step_pairs[group * place.rows + row * 8], 1,
                     place.step_units[row * 16 + 1]);
    } else {
      return place.offsets[group * place.rows + row * 8];
    }
  }
  static __device__ __forceinline__ void promote(const Place& place, int group, const Chain& chain,
                                                 float (&sums)[4]) {
    constexpr float kUnit = kWhole ? CodesInOrder::kUnit : 1.0F;
    const float scales[2] = {scale_of(place, group, 0) * kUnit, scale_of(place, group, 1) * kUnit};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] = fmaf(chain.products[i], scales[i / 2], sums[i]);
      if constexpr (kOffsets) {
        sums[i] = fmaf(chain.rows[i], -offset_of(place, group, i / 2), sums[i]);
      }
    }
  }

  const unsigned char* values_;
  uint32_t lane_;
  uint32_t row_;
  uint32_t quad_;
};

}  // namespace conclave::inline v0::experts::decode
