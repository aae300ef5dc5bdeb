// Weights that are codes, decoded from shared memory to the registers from which wgmma reads its A
// operand: value - zero in bf16, which holds all of them. Scales multiply sums.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/wgmma_of_registers.cuh"
#include "experts/cuda/sm90/codes_in_order.cuh"
#include "experts/cuda/sm90/factor_steps.cuh"
#include "experts/cuda/sm90/stream/config.cuh"
#include "experts/cuda/sm90/stream/lane_words.cuh"

#include <cstdint>
#include <type_traits>

namespace conclave::inline v0::experts::stream {

// A thread's part of 64 columns of K of its warpgroup's 64 weight rows, in one or two terms.
template <int kTerms>
struct CodeFragments {
  static constexpr int kSteps = 4;  // each has 16 columns
  uint32_t step[kSteps][kTerms][4];
};

// Fills the table of values, with all threads of the block. A byte of two codes has the value of
// the lower one, which is the earlier column, in the lower half; a byte of one code has its value
// there. Second terms follow, but of codes as stored, which are listed by code with both terms.
template <class Config>
__device__ __forceinline__ void fill_values(const CodedParams& params,
                                            SharedStorage<Config>& shared) {
  constexpr int32_t kValues = decltype(shared.codes)::kValues;
  constexpr bool kOfCodes = Config::kCodes.terms == 2 && !Config::kCodes.in_pairs;
  constexpr bool kPairs = Config::kCodeBits == 4 && !kOfCodes;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kValues * 32; i += Config::kThreads) {
    const int32_t entry = i / 32;
    uint32_t value = params.values.of[entry & (kPairs ? 15 : 255)];
    if constexpr (kPairs) {
      value = __byte_perm(value, params.values.of[entry >> 4 & 15],
                          Config::kCodes.terms == 1 || entry < 256 ? 0x5410 : 0x7632);
    } else if constexpr (!kOfCodes) {
      value &= 0xffffU;
    }
    shared.codes.values[entry][i % 32] = value;
  }
}

// Looks values up for a thread, in its own copy of the table.
template <class Config>
class CodeValues {
 public:
  __device__ __forceinline__ CodeValues(const SharedStorage<Config>& shared, int32_t lane)
      : pair_(lane % 4), own_(4 * lane), values_(ptx::shared_address(shared.codes.values)) {}

  // Both values of the byte of `codes` that is this thread's: its offset in the table has seven
  // more bits, of lanes.
  __device__ __forceinline__ uint32_t of_byte(uint32_t codes) const {
    return look_up(__funnelshift_r(codes, codes, 8 * pair_ - 7) & 0x7f80U);
  }
  // The first and the second terms of both values of that byte.
  __device__ __forceinline__ void terms_of_byte(uint32_t codes, uint32_t& first,
                                                uint32_t& second) const {
    const uint32_t pair = codes >> (8 * pair_);
    const uint32_t low = look_up((pair & 0xfU) << 7);
    const uint32_t high = look_up((pair & 0xf0U) << 3);
    first = __byte_perm(low, high, 0x5410);
    second = __byte_perm(low, high, 0x7632);
  }
  // A term of the values of a word's four pairs of codes.
  template <int kTerm = 0>
  __device__ __forceinline__ void of_word(uint32_t word, uint32_t (&values)[4]) const {
    constexpr uint32_t kTable = kTerm * 256 * 128;
    values[0] = look_up<kTable>(word << 7 & 0x7f80U);
#pragma unroll
    for (int i = 1; i < 4; ++i) values[i] = look_up<kTable>(word >> (8 * i - 7) & 0x7f80U);
  }
  // The values of two codes of a byte each.
  __device__ __forceinline__ uint32_t of_bytes(uint32_t codes) const {
    const uint32_t low = look_up((codes & 0xffU) << 7);
    const uint32_t high = look_up((codes & 0xff00U) >> 1);
    return __byte_perm(low, high, 0x5410);
  }

 private:
  template <uint32_t kTable = 0>
  __device__ __forceinline__ uint32_t look_up(uint32_t offset) const {
    uint32_t value = 0;
    asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(value) : "r"(values_ + (offset | own_)), "n"(kTable));
    return value;
  }

  int32_t pair_;
  uint32_t own_;  // where the thread's copies begin
  uint32_t values_;
};

// Makes values of int8.
struct WholeBytes {
  static __device__ __forceinline__ uint32_t of_bytes(uint32_t codes) {
    return numbers_of_bytes(codes);
  }
};
template <class Config>
inline constexpr bool kIsScaledBytes = are_scaled_bytes(Config::kCodes);

// Values have the unit of CodesInOrder, not that of a table.
template <class Config>
inline constexpr bool kHasUnitOfNumbers = Config::kCodes.in_order || kIsScaledBytes<Config>;

// Makes values of codes.
template <class Config>
using ValuesOfCodes =
    std::conditional_t<Config::kCodes.in_order, CodesInOrder,
                       std::conditional_t<kIsScaledBytes<Config>, WholeBytes, CodeValues<Config>>>;
template <class Config>
__device__ __forceinline__ ValuesOfCodes<Config> make_values(const CodedParams& params,
                                                             const SharedStorage<Config>& shared,
                                                             int32_t lane) {
  if constexpr (Config::kCodes.in_order) {
    return CodesInOrder(params.least);
  } else if constexpr (kIsScaledBytes<Config>) {
    return WholeBytes();
  } else {
    return CodeValues<Config>(shared, lane);
  }
}

__device__ __forceinline__ uint32_t word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// True if codes may have zero points, which a call's parameters say.
template <class Config>
inline constexpr bool kMayHaveZeros = !Config::kCodes.offsets && !Config::kCodes.steps &&
                                      !Config::kCodes.in_pairs && Config::kCodes.terms == 1;

template <class Config, bool kZeros = false>
class CodeOperand {
 public:
  static constexpr int kTerms = Config::kCodes.terms;
  // Terms of pairs are decoded one after the other.
  static constexpr bool kByTerm = kTerms == 2 && Config::kCodes.in_pairs;
  using Fragments = CodeFragments<kByTerm ? 1 : kTerms>;
  static constexpr bool kInOrder = Config::kCodes.in_order;
  static_assert(!Config::kHasLanes || Config::kCodeBits == 4);
  static_assert(!kZeros || kMayHaveZeros<Config>);

  __device__ __forceinline__ CodeOperand(const Params& params, const SharedStorage<Config>& shared,
                                         int32_t warp, int32_t lane, bool gated)
      : params_(static_cast<const CodedParams&>(params)),
        shared_(shared),
        values_(make_values<Config>(params_, shared, lane)),
        pair_(lane % 4),
        // A thread's first row; the second is eight rows below. With a gate these are the rows of
        // gate and up of one feature.
        row_(16 * warp + lane / 4),
        first_factor_(gated ? 8 * warp + lane / 4 : 16 * warp + lane / 4),
        second_factor_(gated ? first_factor_ + Config::kWeightRows / 2 : first_factor_ + 8) {}

  // Decodes columns 64 atom to 64 atom + 63 of the stage in `slot`.
  template <int kTerm = 0>
  __device__ __forceinline__ void decode(int32_t slot, int atom, Fragments& a) const {
    const uint8_t* codes = shared_.weights[slot][0] + row_ * Config::kAtomBytes;
    const int32_t swizzle = row_ % 8;
    Zeros zeros;
    if constexpr (Config::kHasLanes) {
      const LaneWords<Config> words(shared_, slot, atom, row_, pair_);
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        if constexpr (kZeros) load_zeros(slot, 4 * atom + 2 * word, zeros);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          uint32_t numbers[4];
          if constexpr (kTerm == 0) {
            values_.of_word(words.of(row, word), numbers);
          } else {
            values_.template of_word<kTerm>(words.of(row, word), numbers);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const FragmentPlace place = fragment_of(word, row, i);
            a.step[place.step][0][place.element] = shifted(numbers[i], zeros.of[row]);
          }
        }
      }
    } else if constexpr (Config::kCodeBits == 4) {
      // Four lanes read the same 32 bytes of a row: a byte of each word is theirs.
      uint4 words[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i / 2][i % 2] = *reinterpret_cast<const uint4*>(
            codes + i / 2 * 8 * Config::kAtomBytes + ((2 * atom + i % 2) ^ swizzle) * 16);
      }
#pragma unroll
      for (int step = 0; step < Fragments::kSteps; ++step) {
        if constexpr (kZeros) load_zeros(slot, 4 * atom + step, zeros);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t codes_of_lanes = word_of(words[i % 2][step / 2], step % 2 * 2 + i / 2);
          if constexpr (kTerms == 1) {
            const uint32_t value = values_.of_byte(codes_of_lanes);
            a.step[step][0][i] = shifted(value, zeros.of[i % 2]);
          } else {
            values_.terms_of_byte(codes_of_lanes, a.step[step][0][i], a.step[step][1][i]);
          }
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < Fragments::kSteps; ++step) {
        if constexpr (kZeros) load_zeros(slot, 4 * atom + step, zeros);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint8_t* chunk =
              codes + i % 2 * 8 * Config::kAtomBytes + ((4 * atom + step) ^ swizzle) * 16;
          const uint32_t both = *reinterpret_cast<const uint16_t*>(chunk + 2 * pair_ + i / 2 * 8);
          a.step[step][0][i] = shifted(values_.of_bytes(both), zeros.of[i % 2]);
        }
      }
    }
  }

  // The scales of the thread's two rows for 16 columns of the stage in `slot`, its `steps`th.
  __device__ __forceinline__ float2 scales(int32_t slot, int32_t steps) const {
    if constexpr (Config::kCodes.steps) return scales_of_steps(slot, steps);
    return factors(slot, steps >> params_.steps_shift);
  }
  // The offsets, likewise, in units of sums.
  __device__ __forceinline__ float2 offsets(int32_t slot, int32_t steps) const {
    constexpr float kUnit = kInOrder ? 1.0F / CodesInOrder::kUnit : 1.0F;
    const float2 both = factors(slot, params_.groups_of_stage + (steps >> params_.steps_shift));
    return {both.x * kUnit, both.y * kUnit};
  }

 private:
  // A group has 16 columns.
  __device__ __forceinline__ float2 scales_of_steps(int32_t slot, int32_t group) const {
    const uint8_t* const all = shared_.codes.factors[slot];
    const auto* const pairs =
        reinterpret_cast<const uint16_t*>(all) + group / 2 * Config::kWeightRows;
    const auto* const units =
        reinterpret_cast<const float*>(all + decltype(shared_.codes)::kUnitsAt);
    return {of_step(pairs[first_factor_], group % 2, units[first_factor_]),
            of_step(pairs[second_factor_], group % 2, units[second_factor_])};
  }
  __device__ __forceinline__ float2 factors(int32_t slot, int32_t group) const {
    const auto* const rows =
        reinterpret_cast<const float*>(shared_.codes.factors[slot]) + group * Config::kWeightRows;
    return {rows[first_factor_], rows[second_factor_]};
  }

  // The zero points of the thread's two rows, each in both halves.
  struct Zeros {
    uint32_t of[2];
  };

  // The zero points of 16 columns, where these begin a group or an atom.
  __device__ __forceinline__ void load_zeros(int32_t slot, int32_t steps, Zeros& zeros) const {
    if (steps % 4 != 0 && (steps & ((1 << params_.steps_shift) - 1)) != 0) return;
    const auto* const all = reinterpret_cast<const uint16_t*>(
        shared_.codes.factors[slot] +
        params_.groups_of_stage * Config::kWeightRows * sizeof(float));
    const uint16_t* group = all + (steps >> params_.steps_shift) * Config::kWeightRows;
    if constexpr (kInOrder) {
      zeros.of[0] = values_.zero_of(group[first_factor_]);
      zeros.of[1] = values_.zero_of(group[second_factor_]);
    } else {
      zeros.of[0] = group[first_factor_] * 0x10001U;
      zeros.of[1] = group[second_factor_] * 0x10001U;
    }
  }

  static __device__ __forceinline__ uint32_t shifted(uint32_t values, uint32_t zeros) {
    if constexpr (kZeros) asm("sub.rn.bf16x2 %0, %0, %1;" : "+r"(values) : "r"(zeros));
    return values;
  }

  const CodedParams& params_;
  const SharedStorage<Config>& shared_;
  ValuesOfCodes<Config> values_;
  int32_t pair_;  // the thread has columns 2 pair and 2 pair + 1 of each eight
  int32_t row_;
  int32_t first_factor_;
  int32_t second_factor_;
};

}  // namespace conclave::inline v0::experts::stream
