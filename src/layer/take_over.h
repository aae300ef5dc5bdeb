// A layer on other ranks: what this rank has packed is used where it lies, what it lacks is read.
#pragma once

#include "layer/packed_weights.h"
#include "layer/plan.h"

#include "conclave/context.h"
#include "conclave/weights.h"

#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0 {

// Weights as a plan has them, with the expert in each place, -1 for a free one. They may go before
// the copy does.
struct HeldWeights {
  const LayerPlan& plan;
  const PackedWeights& packed;
  std::span<const int32_t> experts;
};

// True if the plan has parts that are read in their source's memory.
bool reads_in_place(const LayerPlan& plan);

// Packed weights of plans with the same key have the same bytes for the same expert, and for what
// ranks have whole: another library version aside, which ranks compare before.
int64_t form_key(const LayerPlan& plan);

// True if packed weights have the same form in both plans: the same columns in the same panels.
bool has_same_form(const LayerPlan& plan, const LayerPlan& held);

// For each local expert of the plan, where it lies among those that are held, or -1. Without the
// same form, -1 throughout.
std::vector<int32_t> places_held(const LayerPlan& plan, const HeldWeights& held);

// The plan's weights as far as they are held in the same form, which is required; the slabs of
// experts that are missing are there, unfilled.
PackedWeights keep_weights(const Context& context, const LayerPlan& plan, const HeldWeights& held);

// The plan's weights, which share the memory of those that are held. `source` may be null if no
// expert is missing and the form is the same.
PackedWeights take_over_weights(const Context& context, const LayerPlan& plan,
                                const HeldWeights& held, const WeightSource* source);

}  // namespace conclave::inline v0
