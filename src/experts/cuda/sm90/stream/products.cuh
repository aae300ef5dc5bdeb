// The products of bf16 and f16 rows: sums stay in wgmma's accumulators over all of K.
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/wgmma.cuh"
#include "experts/cuda/sm90/stream/code_operand.cuh"
#include "experts/cuda/sm90/stream/epilogue.cuh"
#include "experts/cuda/sm90/stream/exact_operand.cuh"
#include "experts/cuda/sm90/stream/rounded_operand.cuh"

namespace conclave::inline v0::experts::stream {

template <class Config>
struct Products : Epilogue<Config> {
  using Base = Epilogue<Config>;
  using Base::Base;
  using Base::kSlices;
  using Base::lane;
  using Base::params;
  using Base::release;
  using Base::ring;
  using Base::shared;
  using Base::warp;
  using Element = typename Config::Element;

  // The sums of the widest tile: a narrower product has the first of each slice.
  using Sums = float[kSlices][Config::kMaxTokens / 2];
  template <int N>
  static __device__ __forceinline__ auto narrow(float (&sums)[Config::kMaxTokens / 2])
      -> float (&)[N / 2] {
    return reinterpret_cast<float(&)[N / 2]>(sums);
  }

  RingPosition<Config::kTokenStages> tokens = {};  // moves where a kernel has a ring of them
  const bool near = has_near_scales(params);       // for weights that bf16 holds

  static constexpr bool kMayBeShort =
      Config::kCodes.in_order && !(Config::kCodes.offsets || Config::kCodes.zeros ||
                                   Config::kCodes.whole_rows || Config::kCodes.steps);
  static __device__ __forceinline__ bool has_short_scales(const Params& params) {
    if constexpr (!kMayBeShort) return false;
    return *static_cast<const CodedParams&>(params).short_scales != 0;
  }

  static __device__ __forceinline__ bool has_near_scales(const Params& params) {
    if constexpr (!Config::kIsExact) return false;
    return *static_cast<const CodedParams&>(params).byte_form ==
           static_cast<int32_t>(ByteForm::kNear);
  }

  // The descriptor of an atom of tokens: these count in units of 16 bytes.
  __device__ __forceinline__ uint64_t tokens_of(int32_t slot, int atom) const {
    return ptx::wgmma_descriptor_of_low(
        ptx::wgmma_descriptor_low(ptx::shared_address(shared.tokens)) +
        (slot * Config::kTokenAtoms + atom) * (Config::kTokenBytes / 16));
  }

  template <int N>
  __device__ __forceinline__ void multiply_atom(Sums& d, int atom) const {
    const uint64_t a =
        ptx::wgmma_descriptor_128b(ptx::shared_address(shared.weights[ring.slot][atom]) +
                                   warp / 4 * (Config::kWeightBytes / Config::kConsumers));
    const uint64_t b =
        ptx::wgmma_descriptor_128b(ptx::shared_address(shared.tokens[ring.slot][atom]));
#pragma unroll
    for (int k = 0; k < Config::kAtomBytes / 32; ++k) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        // Descriptors count in units of 16 bytes: 2 are 32 bytes of K, 512 are 64 rows.
        ptx::Wgmma<Element, N>::mma(narrow<N>(d[slice]), a + 2 * k + 512 * slice, b + 2 * k, true);
      }
    }
  }

  // d = the weight rows of this warpgroup, 64 per slice, times N tokens, over all of K.
  template <int N, Product kProduct>
  __device__ __forceinline__ void multiply(Sums& d) {
    if constexpr (Config::kIsExact) {
      // Uniform over the grid.
      if (near) {
        multiply_exact<N, kProduct, true>(d);
      } else {
        multiply_exact<N, kProduct, false>(d);
      }
    } else if constexpr (Config::kRounds) {
      // Uniform over the grid.
      if (has_short_scales(params)) {
        // Groups of 128 columns or more.
        if (static_cast<const CodedParams&>(params).steps_shift >= 3) {
          multiply_rounded<N, kProduct, RoundedOperand<Config, kMayBeShort, kMayBeShort>>(d);
        } else {
          multiply_rounded<N, kProduct, RoundedOperand<Config, kMayBeShort>>(d);
        }
      } else {
        multiply_rounded<N, kProduct, RoundedOperand<Config, false>>(d);
      }
    } else if constexpr (Config::kIsCoded) {
      // Uniform over the grid. Zero points have a loop of their own: beside a condition in it,
      // little is worked out ahead.
      if constexpr (kMayHaveZeros<Config>) {
        if (static_cast<const CodedParams&>(params).shift_bytes != 0) {
          multiply_codes<N, kProduct, CodeOperand<Config, true>>(d);
          return;
        }
      }
      multiply_codes<N, kProduct, CodeOperand<Config>>(d);
    } else {
      multiply_values<N, kProduct>(d);
    }
  }

  template <int N, Product kProduct>
  __device__ __forceinline__ void multiply_values(Sums& d) {
#pragma unroll
    for (int i = 0; i < kSlices * N / 2; ++i) d[i / (N / 2)][i % (N / 2)] = 0.0F;
    int32_t previous = 0;
    for (int32_t stage = 0; stage < params.depth_stages; ++stage) {
      ptx::mbarrier_wait(&shared.full[ring.slot], ring.phase);
      // cp.async writes through the generic proxy, wgmma reads through the async proxy.
      if constexpr (!kRowsInOrder<Config, kProduct>) ptx::fence_proxy_async_shared();
      ptx::wgmma_fence();
#pragma unroll
      for (int atom = 0; atom < Config::kAtoms; ++atom) multiply_atom<N>(d, atom);
      ptx::wgmma_commit_group();
      if (stage > 0) {
        ptx::wgmma_wait_group<1>();
        release(previous);
      }
      previous = ring.slot;
      ring.advance();
    }
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < kSlices * N / 2; ++i) {
      ptx::wgmma_fence_operand(d[i / (N / 2)][i % (N / 2)]);
    }
    release(previous);
  }

  // Adds sums of columns that share factors to those of all, and settles both.
  template <int N>
  static __device__ __forceinline__ void add_scaled(float (&d)[N / 2], float (&sums)[N / 2],
                                                    float2 factors) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      ptx::wgmma_fence_operand(sums[i]);
      d[i] = fmaf(sums[i], i % 4 < 2 ? factors.x : factors.y, d[i]);
    }
  }

  // Sums of columns that share factors: of the products, and of the rows alone, which offsets
  // multiply.
  template <int N>
  struct GroupSums {
    float products[N / 2];
    float2 scales;
    float rows[Config::kCodes.offsets ? N / 2 : 1];
    float2 offsets;
  };

  template <int N>
  static __device__ __forceinline__ void clear(GroupSums<N>& sums) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums.products[i] = 0.0F;
#pragma unroll
    for (float& sum : sums.rows) sum = 0.0F;
    sums.scales = {0.0F, 0.0F};
    sums.offsets = {0.0F, 0.0F};
  }
  template <int N>
  static __device__ __forceinline__ void add_group(float (&d)[N / 2], GroupSums<N>& sums) {
    add_scaled<N>(d, sums.products, sums.scales);
    if constexpr (Config::kCodes.offsets) {
      add_scaled<N>(d, sums.rows, {-sums.offsets.x, -sums.offsets.y});
    }
  }

  __device__ __forceinline__ float unit_of_sums() const {
    if constexpr (kHasUnitOfNumbers<Config>) {
      return CodesInOrder::kUnit;
    } else {
      return static_cast<const CodedParams&>(params).values.unit;
    }
  }

  static constexpr int kTermsAtOnce = Config::kCodes.in_pairs ? 1 : Config::kCodes.terms;

  // Multiplies 16 columns whose codes have become `a`.
  template <int N>
  static __device__ __forceinline__ void multiply_step(GroupSums<N>& sums,
                                                       const uint32_t (&a)[kTermsAtOnce][4],
                                                       uint64_t b, bool adds) {
    ptx::WgmmaOfRegisters<N>::mma(sums.products, a[0], b, adds);
    if constexpr (kTermsAtOnce == 2) {
      ptx::WgmmaOfRegisters<N>::mma(sums.products, a[1], b, true);
    }
    if constexpr (Config::kCodes.offsets) {
      constexpr uint32_t kOnes = 0x3f803f80U;
      const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
      ptx::WgmmaOfRegisters<N>::mma(sums.rows, ones, b, adds);
    }
  }

  // The same with weights that are codes. Columns of K that share a scale go through tensor cores
  // unscaled, 16 to 128 at a time; their sums are scaled and added up here. While 64 columns are
  // multiplied, the next are decoded to other registers.
  template <int N, Product kProduct, class Operand>
  __device__ __forceinline__ void multiply_codes(Sums& all) {
    constexpr int kSteps = Config::kCodes.steps_of_sum;
    constexpr int kStepsOfAtom = Operand::Fragments::kSteps;
    // A sum of more columns than an atom has goes over two atoms.
    constexpr bool kLong = kSteps > kStepsOfAtom;
    static_assert(!kLong || kSteps == 2 * kStepsOfAtom);
    // A sum of two terms goes over an atom twice.
    constexpr bool kByTerm = Operand::kByTerm;
    static_assert(!kByTerm || kSteps == kStepsOfAtom);
    constexpr bool kTwoParts = kLong || kByTerm;
    constexpr int kAtomsOfTurn = kByTerm ? 1 : 2;
    constexpr int kStepsOfSet = kLong ? kStepsOfAtom : kSteps;
    constexpr int kMostSets = kStepsOfAtom / kStepsOfSet;
    // Sums that are not scaled yet, as many as registers have room for.
    constexpr int kSumsOfSet = Config::kCodes.offsets ? N : N / 2;
    constexpr int kSets = kSumsOfSet * kMostSets <= 32 ? kMostSets : 1;
    // With many sums there is no room for a second set of operands: the other warpgroup multiplies
    // while this one decodes.
    constexpr int kOperands = 16 * kTermsAtOnce;
    constexpr int kRoom = Config::kConsumers == 4 ? 72 : 112;
    constexpr int kBuffers = N <= 64 && N / 2 + kSumsOfSet * kSets + 2 * kOperands <= kRoom ? 2 : 1;
    // Longer loops have fewer instructions for their addresses, where registers suffice for them.
    constexpr bool kHasRoom = Config::kConsumers < 4 || N <= (Config::kMaxTokens <= 32 ? 32 : 16);
    constexpr int kTurns = kLong && kHasRoom ? Config::kAtoms / 2 : 1;
    float(&d)[N / 2] = narrow<N>(all[0]);
    GroupSums<N> sums[kSets];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] = 0.0F;
#pragma unroll
    for (GroupSums<N>& set : sums) clear<N>(set);
    const Operand operand(params, shared, warp, lane,
                          kProduct == Product::kUp && params.activation.gated);
    typename Operand::Fragments a[kBuffers];
    const auto finish = [&] {
      ptx::wgmma_wait_group<0>();
#pragma unroll
      for (GroupSums<N>& set : sums) add_group<N>(d, set);
    };
    const auto begin_stage = [&] {
      ptx::mbarrier_wait(&shared.full[ring.slot], ring.phase);
      if constexpr (!kRowsInOrder<Config, kProduct>) ptx::fence_proxy_async_shared();
    };
    // Leaves the last sums unfinished. `begins` is false for the second part of a sum.
    const auto multiply = [&](int32_t slot, int atom, const typename Operand::Fragments& codes,
                              bool begins) {
      const uint64_t b = tokens_of(slot, atom);
#pragma unroll
      for (int sum = 0; sum < kMostSets; ++sum) {
        const int set = sum % kSets;
        if (set == 0 && sum > 0) finish();
        if (begins) {
          sums[set].scales = operand.scales(slot, 4 * atom + sum * kStepsOfSet);
          if constexpr (Config::kCodes.offsets) {
            sums[set].offsets = operand.offsets(slot, 4 * atom + sum * kStepsOfSet);
          }
        }
        if (set == 0) ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStepsOfSet; ++step) {
          const int k = sum * kStepsOfSet + step;
          multiply_step<N>(sums[set], codes.step[k], b + 2 * k, step > 0 || !begins);
        }
        if (set == kSets - 1) ptx::wgmma_commit_group();
      }
    };
    // No product may be unfinished where a loop begins anew: its registers would be no other
    // width's.
    const auto decode_second = [&](int32_t slot, int atom, typename Operand::Fragments& codes) {
      if constexpr (kByTerm) {
        operand.template decode<1>(slot, atom, codes);
      } else {
        operand.decode(slot, atom + 1, codes);
      }
    };
    constexpr int kSecond = kByTerm ? 0 : 1;  // its atom, behind that of the first part
    if constexpr (kBuffers == 1) {
      for (int32_t stage = 0; stage < params.depth_stages; ++stage) {
        begin_stage();
        constexpr int kTogether = kLong ? 2 : 1;
#pragma unroll 1
        for (int atom = 0; atom < Config::kAtoms; atom += kTogether) {
          operand.decode(ring.slot, atom, a[0]);
          multiply(ring.slot, atom, a[0], true);
          if constexpr (kTwoParts) {
            ptx::wgmma_wait_group<0>();
            decode_second(ring.slot, atom, a[0]);
            multiply(ring.slot, atom + kSecond, a[0], false);
          }
          finish();
        }
        release(ring.slot);
        ring.advance();
      }
    } else {
      begin_stage();
      operand.decode(ring.slot, 0, a[0]);
      for (int32_t left = params.depth_stages; left > 0; --left) {
        const int32_t slot = ring.slot;
#pragma unroll kTurns
        for (int atom = 0; atom < Config::kAtoms; atom += kAtomsOfTurn) {
          multiply(slot, atom, a[0], true);
          decode_second(slot, atom, a[1]);
          if constexpr (!kTwoParts) finish();
          multiply(slot, atom + kSecond, a[1], !kTwoParts);
          const bool is_last = atom + kAtomsOfTurn == Config::kAtoms;
          if (is_last) ring.advance();
          if (is_last && left > 1) begin_stage();
          if constexpr (kTwoParts) ptx::wgmma_wait_group<1>();
          // Behind the last stage this decodes what is never used, since a condition would have
          // sums moved.
          operand.decode(ring.slot, is_last ? 0 : atom + kAtomsOfTurn, a[0]);
          finish();
        }
        release(slot);
      }
    }
    const float unit = unit_of_sums();
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] *= unit;
  }

  template <int N, Product kProduct, bool kNear>
  __device__ __forceinline__ void multiply_exact(Sums& d) {
    if constexpr (Config::kRounds) {
      multiply_rounded<N, kProduct, ExactOperand<Config, kNear>>(d);
    } else {
      multiply_in_stages<N, kProduct, ExactOperand<Config, kNear>>(narrow<N>(d[0]));
    }
  }

  // The same with weights that bf16 holds: sums stay in wgmma's accumulators over all of K.
  template <int N, Product kProduct, class Operand>
  __device__ __forceinline__ void multiply_in_stages(float (&d)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] = 0.0F;
    const Operand operand(params, shared, warp, lane, false);
    const auto begin_stage = [&] {
      ptx::mbarrier_wait(&shared.full[ring.slot], ring.phase);
      if constexpr (!kRowsInOrder<Config, kProduct>) ptx::fence_proxy_async_shared();
    };
    // Four warpgroups have no registers for a second set of operands beside many sums: three of
    // them decode while one multiplies.
    constexpr bool kTakesTurns = Config::kConsumers == 4 && N > 48;
    RoundedFragments even;
    if constexpr (kTakesTurns) {
      for (int32_t left = params.depth_stages; left > 0; --left) {
        begin_stage();
#pragma unroll
        for (int atom = 0; atom < Config::kAtoms; ++atom) {
          operand.decode(ring.slot, atom, even);
          multiply_fragments<N>(d, even, ring.slot, atom);
          ptx::wgmma_wait_group<0>();
        }
        release(ring.slot);
        ring.advance();
      }
    } else {
      RoundedFragments odd;
      begin_stage();
      operand.decode(ring.slot, 0, even);
      for (int32_t left = params.depth_stages; left > 0; --left) {
        const int32_t slot = ring.slot;
#pragma unroll
        for (int atom = 0; atom < Config::kAtoms; atom += 2) {
          multiply_fragments<N>(d, even, slot, atom);
          operand.decode(slot, atom + 1, odd);
          multiply_fragments<N>(d, odd, slot, atom + 1);
          const bool is_last = atom + 2 == Config::kAtoms;
          if (is_last) ring.advance();
          if (is_last && left > 1) begin_stage();
          ptx::wgmma_wait_group<1>();
          // Behind the last stage this decodes what is never used, since a condition would have
          // sums moved.
          operand.decode(ring.slot, is_last ? 0 : atom + 2, even);
          // No product may be unfinished where a loop begins anew.
          ptx::wgmma_wait_group<0>();
        }
        release(slot);
      }
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) ptx::wgmma_fence_operand(d[i]);
  }

  template <int N>
  __device__ __forceinline__ void multiply_fragments(float (&d)[N / 2], const RoundedFragments& a,
                                                     int32_t slot, int atom) {
    const uint64_t b = tokens_of(slot, atom);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < RoundedFragments::kSteps; ++step) {
      ptx::WgmmaOfRegisters<N>::mma(d, a.step[step], b + 2 * step, true);
    }
    ptx::wgmma_commit_group();
  }

  // Multiplies sums by what weights that bf16 holds lack.
  template <int N, Product kProduct>
  __device__ __forceinline__ void complete_exact(float (&d)[N / 2], int32_t expert) const {
    if constexpr (Config::kIsExact) {
      const float* const factors = static_cast<const CodedParams&>(params).sum_factors;
      const bool gated = kProduct == Product::kUp && params.activation.gated;
      const float first = factors[gated ? 2 * expert : expert];
      const float second = gated ? factors[2 * expert + 1] : first;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) d[i] *= i % 4 < 2 ? first : second;
    }
  }

  // The same with codes that become weights of bf16: sums stay in wgmma's accumulators over all of
  // K. An atom is decoded while the one before it is multiplied.
  template <int N, Product kProduct, class Operand>
  __device__ __forceinline__ void multiply_rounded(Sums& all) {
    float(&d)[N / 2] = narrow<N>(all[0]);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] = 0.0F;
    Operand operand(params, shared, warp, lane,
                    kProduct == Product::kUp && params.activation.gated);
    RoundedFragments even;
    RoundedFragments odd;
    const int32_t pairs = even_atoms(params, Config::kAtomDepth) / 2;
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.phase);
    operand.decode(ring.slot, 0, even);
    float2 row_scales = {1.0F, 1.0F};
    if constexpr (Config::kCodes.whole_rows) row_scales = operand.row_scales();
    // No product may be unfinished where a loop begins anew: its registers would be no other
    // width's. Behind the last atom this decodes what is never used, since a condition would have
    // sums moved.
    int32_t of_stage = 0;  // pairs of atoms of it
    for (int32_t left = pairs; left > 0; --left) {
      const int32_t first = multiply_decoded<N>(d, even);
      operand.decode(ring.slot, 2 * of_stage + 1, odd);
      const int32_t second = multiply_decoded<N>(d, odd);
      const bool ends_stage = ++of_stage == Config::kAtoms / 2 || left == 1;
      if (ends_stage) {
        of_stage = 0;
        release(ring.slot);
        ring.advance();
        if (left > 1) ptx::mbarrier_wait(&shared.full[ring.slot], ring.phase);
      }
      ptx::wgmma_wait_group<1>();
      release_tokens(first);
      operand.decode(ring.slot, 2 * of_stage, even);
      ptx::wgmma_wait_group<0>();
      release_tokens(second);
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      ptx::wgmma_fence_operand(d[i]);
      if constexpr (Operand::kUnit != 1.0F) d[i] *= Operand::kUnit;
      if constexpr (Config::kCodes.whole_rows) {
        d[i] *= i % 4 < 2 ? row_scales.x : row_scales.y;
      }
    }
  }

  // Multiplies an atom of tokens; returns its slot.
  template <int N>
  __device__ __forceinline__ int32_t multiply_decoded(float (&d)[N / 2],
                                                      const RoundedFragments& a) {
    const int32_t slot = tokens.slot;
    ptx::mbarrier_wait(&shared.tokens_full[slot], tokens.phase);
    multiply_fragments<N>(d, a, slot, 0);
    tokens.advance();
    return slot;
  }

  __device__ __forceinline__ void release_tokens(int32_t slot) {
    if (lane == 0) ptx::mbarrier_arrive(&shared.tokens_empty[slot]);
  }
};

}  // namespace conclave::inline v0::experts::stream
