// Weights that are codes, rounded once to bf16 with their factors, in the registers from which
// wgmma reads its A operand. A weight is rounded as an element of a bf16 model is. Where a scale is
// that of a whole row, it multiplies sums instead.
#pragma once

#include "experts/cuda/sm90/factor_steps.cuh"
#include "experts/cuda/sm90/stream/code_operand.cuh"

namespace conclave::inline v0::experts::stream {

// Both halves of a register are numbers of bf16.
namespace pairs {

__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
__device__ __forceinline__ uint32_t subtract(uint32_t a, uint32_t b) {
  uint32_t difference = 0;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}
__device__ __forceinline__ uint32_t round(float low, float high) {
  uint32_t both = 0;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
// The upper bits of a float32 number, in both halves.
__device__ __forceinline__ uint32_t upper_bits(float number) {
  return __byte_perm(__float_as_uint(number), 0, 0x3232);
}
__device__ __forceinline__ float low(uint32_t both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(uint32_t both) { return __uint_as_float(both & 0xffff0000U); }

}  // namespace pairs

// A thread's part of 64 columns of K of its warpgroup's 64 weight rows.
struct RoundedFragments {
  static constexpr int kSteps = 4;  // each has 16 columns
  uint32_t step[kSteps][4];
};

// The codes of two rows' 64 columns, from which a thread takes its own.
template <class Config>
class CodesOfRows {
 public:
  static constexpr int kChunks = Config::kCodeBits / 2;  // a row has

  // `first` is a chunk of 16 bytes, each of which lies where `swizzle` has moved it.
  __device__ __forceinline__ CodesOfRows(const uint8_t* codes, int32_t first, int32_t swizzle,
                                         int32_t pair) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint8_t* const of_row = codes + row * 8 * Config::kAtomBytes;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const uint8_t* const chunk = of_row + ((first + i) ^ swizzle) * 16;
        if constexpr (Config::kCodeBits == 4) {
          words_[row][i] = *reinterpret_cast<const uint4*>(chunk);
        } else {
          pairs_[row][2 * i] = *reinterpret_cast<const uint16_t*>(chunk + 2 * pair);
          pairs_[row][2 * i + 1] = *reinterpret_cast<const uint16_t*>(chunk + 8 + 2 * pair);
        }
      }
    }
  }

  // The codes of element i of a fragment: the byte of four that is the thread's, or two bytes.
  __device__ __forceinline__ uint32_t of(int step, int i) const {
    const int eighth = 2 * step + i / 2;
    if constexpr (Config::kCodeBits == 4) {
      return word_of(words_[i % 2][eighth / 4], eighth % 4);
    } else {
      return pairs_[i % 2][eighth];
    }
  }

 private:
  uint4 words_[Config::kCodeBits == 4 ? 2 : 1][2];
  uint32_t pairs_[Config::kCodeBits == 4 ? 1 : 2][8];
};

// The scale of a row as two numbers of bf16, each in both halves: its upper bits, and what these
// leave, rounded.
class ScaleInTerms {
 public:
  ScaleInTerms() = default;
  __device__ __forceinline__ ScaleInTerms(float scale, float /*shift*/)
      : first_(pairs::upper_bits(scale)) {
    const float rest = scale - pairs::high(first_);
    second_ = pairs::round(rest, rest);
  }
  __device__ __forceinline__ uint32_t weights_of(uint32_t values) const {
    return multiply_add(values, first_, pairs::multiply(values, second_));
  }
  // The same of values in two terms.
  __device__ __forceinline__ uint32_t weights_of_terms(uint32_t values, uint32_t rests) const {
    const uint32_t of_rests = multiply_add(values, second_, pairs::multiply(rests, first_));
    return multiply_add(values, first_, of_rests);
  }

 private:
  uint32_t first_;
  uint32_t second_;
};

// The scale of a row, and what is added to its multiples.
class ScaleAndShift {
 public:
  ScaleAndShift() = default;
  __device__ __forceinline__ ScaleAndShift(float scale, float shift)
      : scale_(scale), shift_(shift) {}
  __device__ __forceinline__ uint32_t weights_of(float low, float high) const {
    return pairs::round(fmaf(low, scale_, shift_), fmaf(high, scale_, shift_));
  }
  __device__ __forceinline__ uint32_t weights_of(uint32_t values) const {
    return weights_of(pairs::low(values), pairs::high(values));
  }

 private:
  float scale_;
  float shift_;
};

// The scale of a row in two terms, and a zero point, which values lose first.
class ScaleAndZero {
 public:
  ScaleAndZero() = default;
  __device__ __forceinline__ ScaleAndZero(float scale, float zero)
      : scale_(scale, 0.0F), zero_(pairs::round(zero, zero)) {}
  __device__ __forceinline__ uint32_t weights_of(uint32_t values) const {
    return scale_.weights_of(pairs::subtract(values, zero_));
  }

 private:
  ScaleInTerms scale_;
  uint32_t zero_;
};

// The zero point of a whole row in both halves, and its scale, which weights do not have yet.
class ZeroOfRow {
 public:
  ZeroOfRow() = default;
  __device__ __forceinline__ ZeroOfRow(float scale, float zero)
      : scale_(scale), zero_(pairs::round(zero, zero)) {}
  __device__ __forceinline__ uint32_t weights_of(uint32_t values) const {
    return pairs::subtract(values, zero_);
  }
  __device__ __forceinline__ float scale() const { return scale_; }

 private:
  float scale_;
  uint32_t zero_;
};

// `kShort`: scales are short, and codes stand for whole numbers in their order; `kLong`: a group
// has 128 columns or more.
template <class Config, bool kShort, bool kLong = false>
class RoundedOperand {
 public:
  // Sums are multiplied by this.
  static constexpr float kUnit = kShort ? ShortWeights::kUnit : 1.0F;
  static_assert(Config::kAtomDepth == 64 && Config::kSlices == 1);

  __device__ __forceinline__ RoundedOperand(const Params& params,
                                            const SharedStorage<Config>& shared, int32_t warp,
                                            int32_t lane, bool gated)
      : params_(static_cast<const CodedParams&>(params)),
        shared_(shared),
        values_(make_values<Config>(params_, shared, lane)),
        pair_(lane % 4),
        row_(16 * warp + lane / 4),
        first_factor_(gated ? 8 * warp + lane / 4 : row_),
        second_factor_(gated ? first_factor_ + Config::kWeightRows / 2 : row_ + 8),
        steps_mask_((1 << params_.steps_shift) - 1) {}

  // Decodes columns 64 atom to 64 atom + 63 of the stage in `slot`.
  __device__ __forceinline__ void decode(int32_t slot, int32_t atom, RoundedFragments& a) {
    if constexpr (Config::kHasLanes) {
      decode_lanes(slot, atom, a);
    } else {
      decode_stored(slot, atom, a);
    }
  }

  // The scales of the thread's two whole rows, once an atom of these is decoded.
  __device__ __forceinline__ float2 row_scales() const {
    return {factors_[0].scale(), factors_[1].scale()};
  }

 private:
  static constexpr bool kShifts = Config::kCodes.offsets;
  static constexpr bool kTwoTerms = Config::kCodes.terms == 2;
  static constexpr bool kPairsInTerms = kTwoTerms && Config::kCodes.in_pairs;
  static constexpr bool kWholeRows = Config::kCodes.whole_rows;
  static constexpr bool kInOrder = Config::kCodes.in_order;
  static constexpr bool kTakesZeros = kWholeRows || Config::kCodes.zeros;
  static_assert(!kShort || (kInOrder && !kShifts && !kTakesZeros));
  template <bool kHas, class Has, class Else>
  using If = std::conditional_t<kHas, Has, Else>;
  using Factors =
      If<kShort, ShortWeights,
         If<kWholeRows, ZeroOfRow,
            If<kTakesZeros, ScaleAndZero,
               If<kShifts || (kTwoTerms && !kPairsInTerms), ScaleAndShift, ScaleInTerms>>>>;

  __device__ __forceinline__ void decode_stored(int32_t slot, int32_t atom, RoundedFragments& a) {
    using Codes = CodesOfRows<Config>;
    const Codes codes(shared_.weights[slot][0] + row_ * Config::kAtomBytes, atom * Codes::kChunks,
                      row_ % 8, pair_);
#pragma unroll
    for (int step = 0; step < RoundedFragments::kSteps; ++step) {
      if constexpr (kIsScaledBytes<Config>) {
        load_scale_steps(shared_.codes.factors[slot], atom, step);
      } else {
        const int32_t steps = RoundedFragments::kSteps * atom + step;
        if ((steps & steps_mask_) == 0) load_factors(slot, steps >> params_.steps_shift);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) a.step[step][i] = weights_of(codes.of(step, i), factors_[i % 2]);
    }
  }

  // Factors change at multiples of 32 columns.
  __device__ __forceinline__ void decode_lanes(int32_t slot, int32_t atom, RoundedFragments& a) {
    const LaneWords<Config> words(shared_, slot, atom, row_, pair_);
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const int32_t steps = RoundedFragments::kSteps * atom + 2 * word;
      // Those of longer groups are read anew, so that there is no condition.
      const bool begins_pair = steps % (2 * RoundedFragments::kSteps) == 0;
      if (begins_pair || (!kLong && (steps & steps_mask_) == 0))
        load_factors(slot, steps >> params_.steps_shift);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        uint32_t weights[4];
        if constexpr (kShort) {
          factors_[row].of_word(words.of(row, word), weights);
        } else {
          values_.of_word(words.of(row, word), weights);
          if constexpr (kPairsInTerms) {
            uint32_t rests[4];
            values_.template of_word<1>(words.of(row, word), rests);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              weights[i] = factors_[row].weights_of_terms(weights[i], rests[i]);
            }
          } else {
#pragma unroll
            for (uint32_t& weight : weights) weight = factors_[row].weights_of(weight);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const FragmentPlace place = fragment_of(word, row, i);
          a.step[place.step][place.element] = weights[i];
        }
      }
    }
  }

  __device__ __forceinline__ uint32_t weights_of(uint32_t codes, const Factors& factors) const {
    if constexpr (kTwoTerms) {
      uint32_t first = 0;
      uint32_t second = 0;
      values_.terms_of_byte(codes, first, second);
      return factors.weights_of(pairs::low(first) + pairs::low(second),
                                pairs::high(first) + pairs::high(second));
    } else if constexpr (Config::kCodeBits == 4) {
      return factors.weights_of(values_.of_byte(codes));
    } else {
      return factors.weights_of(values_.of_bytes(codes));
    }
  }

  __device__ __forceinline__ void load_factors(int32_t slot, int32_t group) {
    const uint8_t* const all = shared_.codes.factors[slot];
    if constexpr (Config::kCodes.steps) {
      load_steps(all, group);
      return;
    }
    const auto* const scales = reinterpret_cast<const float*>(all) + group * Config::kWeightRows;
    const uint8_t* const shifts = all +
                                  params_.groups_of_stage * Config::kWeightRows * sizeof(float) +
                                  group * Config::kWeightRows * params_.shift_bytes;
    const float first = scales[first_factor_];
    const float second = scales[second_factor_];
    if constexpr (kShort) {
      factors_[0] = Factors(first, params_.least);
      factors_[1] = Factors(second, params_.least);
    } else {
      const float unit = unit_of_values();
      factors_[0] = Factors(first * unit, shift_of(shifts, first_factor_, first));
      factors_[1] = Factors(second * unit, shift_of(shifts, second_factor_, second));
    }
  }

  __device__ __forceinline__ void load_steps(const uint8_t* all, int32_t group) {
    const auto* const steps = reinterpret_cast<const uint16_t*>(all) + group * Config::kWeightRows;
    const auto* const units =
        reinterpret_cast<const float2*>(all + decltype(shared_.codes)::kUnitsAt);
    const float2 first = of_steps(steps[first_factor_], units[first_factor_]);
    const float2 second = of_steps(steps[second_factor_], units[second_factor_]);
    factors_[0] = Factors(first.x * unit_of_values(), -first.y);
    factors_[1] = Factors(second.x * unit_of_values(), -second.y);
  }

  // Each 16 columns of an atom have a scale, of which a pair has two; all share a unit.
  __device__ __forceinline__ void load_scale_steps(const uint8_t* all, int32_t atom, int step) {
    const int32_t rows[2] = {first_factor_, second_factor_};
    const auto* const pairs = reinterpret_cast<const uint16_t*>(all);
    const auto* const units =
        reinterpret_cast<const float*>(all + decltype(shared_.codes)::kUnitsAt);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (step == 0) step_units_[i] = units[rows[i]];
      if (step % 2 == 0) {
        step_pairs_[i] = pairs[(2 * atom + step / 2) * Config::kWeightRows + rows[i]];
      }
      const float scale = of_step(step_pairs_[i], step % 2, step_units_[i]);
      factors_[i] = Factors(scale * unit_of_values(), 0.0F);
    }
  }

  // An offset, or that which a zero point makes, is taken away, or a zero point in units of values.
  __device__ __forceinline__ float shift_of(const uint8_t* shifts, int32_t row, float scale) const {
    if constexpr (kTakesZeros) {
      if (params_.shift_bytes == 0) return 0.0F;
      return pairs::low(reinterpret_cast<const uint16_t*>(shifts)[row]) / unit_of_values();
    }
    if constexpr (!kShifts) return 0.0F;
    if (params_.shift_bytes == sizeof(float)) return -reinterpret_cast<const float*>(shifts)[row];
    return -pairs::low(reinterpret_cast<const uint16_t*>(shifts)[row]) * scale;
  }

  __device__ __forceinline__ float unit_of_values() const {
    if constexpr (kHasUnitOfNumbers<Config>) {
      return CodesInOrder::kUnit;
    } else {
      // Values with a unit have no zero points.
      return kTakesZeros || kShifts ? 1.0F : params_.values.unit;
    }
  }

  const CodedParams& params_;
  const SharedStorage<Config>& shared_;
  ValuesOfCodes<Config> values_;
  int32_t pair_;
  int32_t row_;  // the second one is eight below
  int32_t first_factor_;
  int32_t second_factor_;
  int32_t steps_mask_;
  Factors factors_[2];
  // FactorForm::kScaleSteps: those of the thread's two rows
  uint32_t step_pairs_[2];
  float step_units_[2];
};

}  // namespace conclave::inline v0::experts::stream
