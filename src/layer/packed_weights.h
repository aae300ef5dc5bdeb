// Pulls a rank's experts, or its slices of them, from a WeightSource into the plan's packed layout,
// in parallel.
#pragma once

#include "core/relaxed_count.h"
#include "gemm/gate_product.h"
#include "layer/expert_slabs.h"
#include "layer/lent_experts.h"
#include "layer/plan.h"
#include "layer/router_vectors.h"
#include "quant/code_meaning.h"
#include "spec/layer_weights.h"

#include "conclave/context.h"
#include "conclave/weights.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace conclave::inline v0 {

// Packed weights of one layer. Slabs never move, unless a layer must have a copy of its own before
// it changes what another one reads as well.
struct PackedWeights {
  ExpertSlabs gate_up;
  ExpertSlabs down;
  ExpertSlabs shared_gate_up;
  ExpertSlabs shared_down;
  ExpertSlabs residual_gate_up;
  ExpertSlabs residual_down;
  // In place of the slabs above, of the parts that the plan reads in place.
  LentExperts lent_experts;
  LentExperts lent_shared;
  LentExperts lent_residual;
  // XXH3-64 of the matrices below as their source had them.
  WeightTable<uint64_t> stored_hashes;
  std::unique_ptr<gemm::DenseProduct> gate;  // null without a gate
  RelaxedCount gate_rows_with_nan;
  std::unique_ptr<gemm::DenseProduct> shared_gate;  // null except for SharedMode::kSigmoidGate
  std::unique_ptr<gemm::DenseProduct> mix_gate;     // null except for SharedMode::kSoftmaxMix
  std::unique_ptr<gemm::DenseProduct> latent_down;  // null without a latent projection
  std::unique_ptr<gemm::DenseProduct> latent_up;
  // Vectors, widened to float; empty if the spec has none.
  std::vector<float> mix_gate_bias;  // [2]
  std::vector<float> latent_norm;    // [Hl]
  std::vector<float> output_bias;    // [H]
  RouterVectors router;
  // Ones, unless the checkpoint states them.
  StaticScales static_scales;
  StaticScales shared_static_scales;
};

// Checks that `source` holds all weights of the spec in their shapes and types; reads nothing.
// Throws Error(kTensorMissing, kTensorShape, kTensorDType) naming the tensor.
void check_source(const MoeSpec& spec, const WeightSource& source);
// The same for one kind of weights.
void check_weights_of(const WeightSource& source, const WeightShape& shape);

// For an in-place reload: throws Error(kState) unless `source` has what the plan reads in place
// where `weights` have it.
void check_lent(const LayerPlan& plan, const WeightSource& source, const PackedWeights& weights);

// Room for the plan's weights, unfilled. Throws Error(kOutOfMemory).
PackedWeights allocate_weights(const Context& context, const LayerPlan& plan);

// All slabs of the weights, for what is to be done with each kind.
inline constexpr std::array kSlabsOfWeights = {
    &PackedWeights::gate_up,          &PackedWeights::down,
    &PackedWeights::shared_gate_up,   &PackedWeights::shared_down,
    &PackedWeights::residual_gate_up, &PackedWeights::residual_down};

// Packs source expert experts[i] as local expert i, and nothing where that is -1.
void pack_routed_experts(const Context& context, const LayerPlan& plan, const WeightSource& source,
                         std::span<const int32_t> experts, PackedWeights& weights);

// Fills every slab; `weights` is complete only if this returns. Reports progress. Copies of source
// weights take at most a tenth of the packed bytes and one expert at a time; sources with views
// need none. Experts go to their places: `experts` has one for each place, -1 for a free one.
void fill_weights(const Context& context, const LayerPlan& plan, const WeightSource& source,
                  std::span<const int32_t> experts, PackedWeights& weights);

// The slabs of one place.
struct PlaceSlabs {
  std::byte* gate_up = nullptr;
  std::byte* down = nullptr;
};
// Packs one routed expert on the calling thread.
void pack_expert(const Context& context, const LayerPlan& plan, const WeightSource& source,
                 int32_t expert, const PlaceSlabs& slabs);

}  // namespace conclave::inline v0
