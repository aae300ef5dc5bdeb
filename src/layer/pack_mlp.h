// Reads the experts of one kind and packs them: part by part, in parallel, in bounded memory.
#pragma once

#include "experts/kernel.h"

#include "conclave/context.h"
#include "conclave/placement.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace conclave::inline v0 {

// Experts of one kind: which they are in the source, this rank's columns of them, and their
// destination.
struct MlpWeights {
  const experts::ExpertsKernel& kernel;
  WeightMlp mlp;
  TensorSlice inner;
  bool gated = true;
  bool has_bias = false;
  bool adds_down_bias = true;
  const QuantSpec* quant = nullptr;          // for matrices of codes; null: plain ones
  std::span<std::byte* const> gate_up = {};  // [places] slabs
  std::span<std::byte* const> down = {};
  bool packs_gate_up = true;  // false: these slabs stay, and the source is not asked for them
  bool packs_down = true;
  std::string_view progress_phase = {};  // empty: no progress is reported
};

// Packs source expert source_experts[i] into place i, and nothing where that is -1. All workers
// together copy at most `scratch_bytes` at a time, or one panel each if that is more; a source with
// views needs no copies. Progress goes to the context.
void pack_experts(const Context& context, Executor& executor, const MlpWeights& mlp,
                  const WeightSource& source, std::span<const int32_t> source_experts,
                  size_t scratch_bytes);

// Throws what packing them would throw for scales, zeros, orders and factors that mean nothing.
// Codes are not read.
void check_meanings(Executor& executor, const MlpWeights& mlp, const WeightSource& source,
                    std::span<const int32_t> source_experts);

}  // namespace conclave::inline v0
