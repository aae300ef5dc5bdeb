// Products of codes of up to 4 bits whose scales are steps of 16 columns: weights are whole
// numbers, so that sums of a stage need no more than its units. Offsets multiply sums of rows, as
// in offset_products.cuh, which their steps, of bf16, do without a rounding.
#pragma once

#include "experts/cuda/sm90/stream/epilogue.cuh"
#include "experts/cuda/sm90/stream/products.cuh"
#include "experts/cuda/sm90/stream/row_sums.cuh"
#include "experts/cuda/sm90/stream/small_operand.cuh"
#include "experts/cuda/sm90/stream/step_operand.cuh"

#include <cstdint>
#include <type_traits>

namespace conclave::inline v0::experts::stream {

template <class Config>
inline constexpr bool kMultipliesSteps = multiply_steps(Config::kCodes) && !Config::kRounds;

template <class Config>
  requires kMultipliesSteps<Config>
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
  static constexpr bool kOffsets = Config::kCodes.offsets;
  using Operand =
      std::conditional_t<are_small(Config::kCodes), SmallOperand<Config>, StepOperand<Config>>;
  using Factors = typename Operand::Factors;

  // The sums of the widest tile: a narrower product has the first ones.
  using Sums = float[kSlices][Config::kMaxTokens / 2];

  // Sums of a stage's columns: of the products, and of what offsets take away.
  template <int N>
  struct StageSums {
    float products[N / 2];
    float shifts[kOffsets ? N / 2 : 1];
  };

  // d = the weight rows of this warpgroup times N tokens, over all of K.
  template <int N, Product kProduct>
  __device__ __forceinline__ void multiply(Sums& all) {
    // Sums may leave no room for a second set of operands: then another warpgroup multiplies while
    // this one decodes.
    constexpr int kOfSums = N / 2 * (kOffsets ? 3 : 2);
    constexpr int kRoom = Config::kConsumers == 4 ? 72 : 176;
    constexpr bool kTakesTurns = kOfSums + 32 > kRoom;
    auto& d = reinterpret_cast<float(&)[N / 2]>(all[0]);
    StageSums<N> sums;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] = sums.products[i] = 0.0F;
#pragma unroll
    for (float& shift : sums.shifts) shift = 0.0F;
    const Operand operand(params, shared, warp, lane,
                          kProduct == Product::kUp && params.activation.gated);
    const int32_t parts = Operand::parts(params);
    const auto begin_stage = [&] {
      ptx::mbarrier_wait(&shared.full[ring.slot], ring.phase);
      if constexpr (!kRowsInOrder<Config, kProduct>) ptx::fence_proxy_async_shared();
    };
    // No product may be unfinished where a loop begins anew: its registers would be no other
    // width's.
    if constexpr (kTakesTurns) {
      RoundedFragments a;
      for (int32_t left = params.depth_stages; left > 0; --left) {
        begin_stage();
        for (int32_t part = 0; part < parts; ++part) {
          const StepPart own(part, parts);
#pragma unroll 1
          for (int atom = 0; atom < Config::kAtoms; ++atom) {
            operand.decode(ring.slot, atom, own, a);
            multiply_atom<N>(sums, a, ring.slot, atom, part + atom > 0);
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group<0>();
          }
        }
        multiply_row_sums<N>(sums, operand.factors(), ring.slot);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();
        add_stage<N>(d, sums, operand.factors(), ring.slot);
        release(ring.slot);
        ring.advance();
      }
    } else {
      RoundedFragments even;
      RoundedFragments odd;
      begin_stage();
      operand.decode(ring.slot, 0, StepPart(0, parts), even);
      for (int32_t left = params.depth_stages; left > 0; --left) {
        const int32_t slot = ring.slot;
        for (int32_t part = 0; part < parts; ++part) {
          const bool is_last_part = part + 1 == parts;
          const StepPart own(part, parts);
#pragma unroll
          for (int atom = 0; atom < Config::kAtoms; atom += 2) {
            const bool ends_part = atom + 2 == Config::kAtoms;
            const bool is_last = ends_part && is_last_part;
            multiply_atom<N>(sums, even, slot, atom, part + atom > 0);
            ptx::wgmma_commit_group();
            operand.decode(slot, atom + 1, own, odd);
            multiply_atom<N>(sums, odd, slot, atom + 1, true);
            if (is_last) multiply_row_sums<N>(sums, operand.factors(), slot);
            ptx::wgmma_commit_group();
            if (is_last) ring.advance();
            if (is_last && left > 1) begin_stage();
            ptx::wgmma_wait_group<1>();
            // Behind the last stage this decodes what is never used, since a condition would have
            // sums moved.
            operand.decode(ring.slot, ends_part ? 0 : atom + 2,
                           ends_part ? StepPart(is_last ? 0 : 1, parts) : own, even);
            ptx::wgmma_wait_group<0>();
          }
        }
        add_stage<N>(d, sums, operand.factors(), slot);
        release(slot);
      }
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] *= Operand::kUnit;
  }

  // Sums lack nothing.
  template <int N, Product kProduct>
  __device__ __forceinline__ void complete_exact(float (& /*d*/)[N / 2], int32_t /*expert*/) const {
  }

 private:
  static_assert(kSlices == 1 && Config::kAtoms == 4);

  template <int N>
  __device__ __forceinline__ void multiply_atom(StageSums<N>& sums, const RoundedFragments& a,
                                                int32_t slot, int atom, bool adds) const {
    // Found anew from a stage's first atom, a descriptor takes one instruction.
    const uint32_t b = ptx::wgmma_descriptor_low(ptx::shared_address(shared.tokens[slot][0])) +
                       static_cast<uint32_t>(atom * (Config::kTokenBytes >> 4));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < RoundedFragments::kSteps; ++step) {
      ptx::WgmmaOfRegisters<N>::mma(sums.products, a.step[step],
                                    ptx::wgmma_descriptor_of_low(b + 2 * step), adds || step > 0);
    }
  }

  // Multiplies the stage's offsets by sums of rows, in three terms of which each has 16 columns.
  template <int N>
  __device__ __forceinline__ void multiply_row_sums(StageSums<N>& sums, const Factors& factors,
                                                    int32_t slot) const {
    if constexpr (kOffsets) {
      using Storage = SummedStorage<Config>;
      auto& storage = static_cast<Storage&>(shared);
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = factors.offsets(slot, lane % 4 * 2 + i / 2 * 8, i % 2);
      }
      // The ring is advanced behind this.
      ptx::mbarrier_wait(&storage.sums_full[ring.slot], ring.phase);
      const uint32_t address = ptx::shared_address(storage.sums[Storage::sum_slot(slot)]);
      ptx::wgmma_fence();
#pragma unroll
      for (int term = 0; term < kRowSumTerms; ++term) {
        constexpr int kBytesOfTerm = Storage::kBlocksOfTerm * Storage::kBlockBytes;
        ptx::WgmmaOfRegisters<N>::mma(
            sums.shifts, a, row_sum_descriptor<Config>(address + term * kBytesOfTerm, 1), term > 0);
      }
    }
  }

  // Adds what a stage's columns come to, in units of codes and steps.
  template <int N>
  static __device__ __forceinline__ void add_stage(float (&d)[N / 2], StageSums<N>& sums,
                                                   const Factors& factors, int32_t slot) {
    const typename Factors::Units units = factors.units(slot);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      ptx::wgmma_fence_operand(sums.products[i]);
      d[i] = fmaf(sums.products[i], i % 4 < 2 ? units.scales.x : units.scales.y, d[i]);
    }
    if constexpr (kOffsets) {
      constexpr float kUnit = -CodesInOrder::kUnit / Operand::kUnit;
      const float2 offsets = {units.offsets.x * kUnit, units.offsets.y * kUnit};
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        ptx::wgmma_fence_operand(sums.shifts[i]);
        d[i] = fmaf(sums.shifts[i], i % 4 < 2 ? offsets.x : offsets.y, d[i]);
      }
    }
  }
};

}  // namespace conclave::inline v0::experts::stream
