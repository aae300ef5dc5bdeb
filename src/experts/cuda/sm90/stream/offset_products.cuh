// Products of codes that stand for whole numbers, with offsets. These multiply sums of the rows
// alone, which other warps have made: a few products for a stage in the place of one for each 16
// columns.
#pragma once

#include "experts/cuda/sm90/stream/epilogue.cuh"
#include "experts/cuda/sm90/stream/offset_factors.cuh"
#include "experts/cuda/sm90/stream/products.cuh"
#include "experts/cuda/sm90/stream/row_sums.cuh"

namespace conclave::inline v0::experts::stream {

template <class Config>
inline constexpr bool kMultipliesRowSums = Config::kCodes.in_order && Config::kCodes.offsets &&
                                           !Config::kRounds && !multiply_steps(Config::kCodes);

template <class Config>
  requires kMultipliesRowSums<Config>
struct Products<Config> : Epilogue<Config> {
  using Base = Epilogue<Config>;
  using Base::Base;
  using Base::kSlices;
  using Base::lane;
  using Base::params;
  using Base::release;
  using Base::ring;
  using Base::shared;
  using Base::warp;
  using Operand = CodeOperand<Config>;
  using Fragments = typename Operand::Fragments;
  using Factors = OffsetFactors<Config>;

  // The sums of the widest tile: a narrower product has the first ones.
  using Sums = float[kSlices][Config::kMaxTokens / 2];

  // Sums of 32 columns, which share a scale.
  template <int N>
  struct GroupSums {
    float products[N / 2];
    float2 scales;
  };

  // d = the weight rows of this warpgroup times N tokens, over all of K.
  template <int N, Product kProduct>
  __device__ __forceinline__ void multiply(Sums& all) {
    constexpr int kMostSets = Fragments::kSteps / kStepsOfSum;
    constexpr int kSets = N <= 32 ? kMostSets : 1;
    // With many sums there is no room for a second set of operands: the other warpgroup multiplies
    // while this one decodes.
    constexpr int kRoom = Config::kConsumers == 4 ? 72 : 112;
    constexpr int kBuffers = N + N / 2 * kSets + 32 <= kRoom ? 2 : 1;
    auto& d = reinterpret_cast<float(&)[N / 2]>(all[0]);
    float shifts[N / 2];
    GroupSums<N> sums[kSets];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      d[i] = shifts[i] = 0.0F;
      for (GroupSums<N>& set : sums) set.products[i] = 0.0F;
    }
    for (GroupSums<N>& set : sums) set.scales = {0.0F, 0.0F};
    const bool gated = kProduct == Product::kUp && params.activation.gated;
    const Operand operand(params, shared, warp, lane, gated);
    const Factors factors(params, shared, warp, lane, gated);
    const auto finish = [&] {
      ptx::wgmma_wait_group<0>();
#pragma unroll
      for (GroupSums<N>& set : sums) add_scaled<N>(d, set);
    };
    const auto begin_stage = [&] {
      ptx::mbarrier_wait(&shared.full[ring.slot], ring.phase);
      if constexpr (!kRowsInOrder<Config, kProduct>) ptx::fence_proxy_async_shared();
    };
    // Leaves the last sums unfinished.
    const auto multiply_atom = [&](int32_t slot, int atom, const Fragments& codes) {
      const uint64_t b = ptx::wgmma_descriptor_128b(ptx::shared_address(shared.tokens[slot][atom]));
      const float own_scale = factors.own_scale(slot, atom);
#pragma unroll
      for (int sum = 0; sum < kMostSets; ++sum) {
        const int set = sum % kSets;
        if (set == 0 && sum > 0) finish();
        sums[set].scales = factors.scales(slot, atom, sum, own_scale);
        if (set == 0) ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStepsOfSum; ++step) {
          const int k = sum * kStepsOfSum + step;
          ptx::WgmmaOfRegisters<N>::mma(sums[set].products, codes.step[k][0], b + 2 * k, step > 0);
        }
        if (set == kSets - 1) ptx::wgmma_commit_group();
      }
    };
    // No product may be unfinished where a loop begins anew: its registers would be no other
    // width's.
    Fragments a[kBuffers];
    OffsetTerms offsets;
    if constexpr (kBuffers == 1) {
      for (int32_t stage = 0; stage < params.depth_stages; ++stage) {
        begin_stage();
#pragma unroll 1
        for (int atom = 0; atom < Config::kAtoms; ++atom) {
          operand.decode(ring.slot, atom, a[0]);
          multiply_atom(ring.slot, atom, a[0]);
          finish();
        }
        load_offsets(factors, ring.slot, offsets);
        multiply_row_sums<N>(shifts, offsets);
        ptx::wgmma_wait_group<0>();
        release(ring.slot);
        ring.advance();
      }
    } else {
      begin_stage();
      operand.decode(ring.slot, 0, a[0]);
      for (int32_t left = params.depth_stages; left > 0; --left) {
        const int32_t slot = ring.slot;
#pragma unroll
        for (int atom = 0; atom < Config::kAtoms; atom += 2) {
          multiply_atom(slot, atom, a[0]);
          operand.decode(slot, atom + 1, a[1]);
          finish();
          multiply_atom(slot, atom + 1, a[1]);
          const bool is_last = atom + 2 == Config::kAtoms;
          if (is_last) {
            load_offsets(factors, slot, offsets);
            multiply_row_sums<N>(shifts, offsets);
            ring.advance();
          }
          if (is_last && left > 1) begin_stage();
          // Behind the last stage this decodes what is never used, since a condition would have
          // sums moved.
          operand.decode(ring.slot, is_last ? 0 : atom + 2, a[0]);
          finish();
        }
        release(slot);
      }
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      ptx::wgmma_fence_operand(shifts[i]);
      d[i] = (d[i] + shifts[i]) * CodesInOrder::kUnit;
    }
  }

  // Sums lack nothing.
  template <int N, Product kProduct>
  __device__ __forceinline__ void complete_exact(float (& /*d*/)[N / 2], int32_t /*expert*/) const {
  }

 private:
  static constexpr int kStepsOfSum = Config::kCodes.steps_of_sum;
  static_assert(kStepsOfSum == 2 && kSlices == 1);
  static constexpr int kRowSums = SummedStorage<Config>::kRowSums;

  template <int N>
  static __device__ __forceinline__ void add_scaled(float (&d)[N / 2], GroupSums<N>& sums) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      ptx::wgmma_fence_operand(sums.products[i]);
      d[i] = fmaf(sums.products[i], i % 4 < 2 ? sums.scales.x : sums.scales.y, d[i]);
    }
  }

  // The thread's columns of A are two neighbouring groups.
  __device__ __forceinline__ void load_offsets(const Factors& factors, int32_t slot,
                                               OffsetTerms& offsets) const {
    // In units of sums.
    constexpr float kUnit = -1.0F / CodesInOrder::kUnit;
    const int32_t group = lane % (kRowSums / 2) * 2;
    const typename Factors::Units units = factors.units(slot);
    const float2 first = factors.offsets(slot, group, units);
    const float2 second = factors.offsets(slot, group + 1, units);
    offsets.set(0, first.x * kUnit, second.x * kUnit);
    offsets.set(1, first.y * kUnit, second.y * kUnit);
  }

  // Adds the products of a stage's offsets and sums of rows, whose least terms would not show.
  template <int N>
  __device__ __forceinline__ void multiply_row_sums(float (&shifts)[N / 2],
                                                    const OffsetTerms& offsets) const {
    auto& storage = static_cast<SummedStorage<Config>&>(shared);
    ptx::mbarrier_wait(&storage.sums_full[ring.slot], ring.phase);
    const uint32_t address =
        ptx::shared_address(storage.sums[SummedStorage<Config>::sum_slot(ring.slot)]);
    if constexpr (kRowSums == 8) {
      multiply_eight<N>(shifts, offsets.of, address);
    } else {
      multiply_four<N>(shifts, offsets.of, address);
    }
    ptx::wgmma_commit_group();
  }

  // Eight columns of K are those of one term of eight sums, and eight those of another.
  template <int N>
  static __device__ __forceinline__ void multiply_eight(float (&shifts)[N / 2],
                                                        const uint32_t (&terms)[kRowSumTerms][2],
                                                        uint32_t address) {
    const uint64_t high_and_middle = row_sum_descriptor<Config>(address, 1);
    const uint64_t high_and_low = row_sum_descriptor<Config>(address, 2);
    const auto& [high, middle, low] = terms;
    const uint32_t a_high[4] = {high[0], high[1], high[0], high[1]};
    const uint32_t a_middle[4] = {middle[0], middle[1], middle[0], middle[1]};
    const uint32_t a_low[4] = {low[0], low[1], high[0], high[1]};
    ptx::wgmma_fence();
    ptx::WgmmaOfRegisters<N>::mma(shifts, a_high, high_and_middle, true);
    ptx::WgmmaOfRegisters<N>::mma(shifts, a_middle, high_and_middle, true);
    ptx::WgmmaOfRegisters<N>::mma(shifts, a_low, high_and_low, true);
  }

  // Four columns are those of one term of four sums: the high, the middle, the low and again the
  // high ones.
  template <int N>
  __device__ __forceinline__ void multiply_four(float (&shifts)[N / 2],
                                                const uint32_t (&terms)[kRowSumTerms][2],
                                                uint32_t address) const {
    const uint64_t sums = row_sum_descriptor<Config>(address, 1);
    const auto& [high, middle, low] = terms;
    const bool is_first = lane % 4 < 2;
    const uint32_t a[4] = {high[0], high[1], is_first ? high[0] : middle[0],
                           is_first ? high[1] : middle[1]};
    const uint32_t rest[4] = {is_first ? low[0] : middle[0], is_first ? low[1] : middle[1], 0, 0};
    ptx::wgmma_fence();
    ptx::WgmmaOfRegisters<N>::mma(shifts, a, sums, true);
    ptx::WgmmaOfRegisters<N>::mma(shifts, rest, sums, true);
  }
};

}  // namespace conclave::inline v0::experts::stream
