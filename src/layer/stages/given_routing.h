// Loads routing that the caller brings, rows of a chunk: checked once more against the layer and
// converted to the router's types.
#pragma once

#include "layer/kernel_counts.h"
#include "layer/stages/padding.h"

#include "conclave/spec.h"
#include "conclave/tensor.h"

#include <cstdint>

namespace conclave::inline v0 {

// Ids of the first k slots, [T, k]. Ids outside [0, E + Z) become -1; all but -1 itself are
// counted.
void load_given_ids(const MoeSpec& spec, const ConstTensorView& given, int32_t* ids,
                    KernelCounts& counts);

// Weights of `slots` slots from slot `first` on, [T, slots].
void load_given_weights(const ConstTensorView& given, int64_t first, int64_t slots, float* weights);

// For SharedMode::kFusedSlots: sets weight 0 for each slot of a shared expert whose given id is not
// that of its expert, E + i.
void drop_unused_slots(const MoeSpec& spec, const ConstTensorView& given, float* shared_weights,
                       KernelCounts& counts);

// [T] as int32; 0 for padding, whose id has no meaning.
void load_token_ids(const ConstTensorView& given, const Padding& padding, int32_t* token_ids);

}  // namespace conclave::inline v0
