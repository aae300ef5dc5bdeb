// Makes the rows that the routed experts read: hidden in their format, its latent projection, or
// rows times their routing weight.
#pragma once

#include "core/flow.h"
#include "experts/kernel.h"

#include "conclave/context.h"
#include "conclave/routing.h"
#include "conclave/tensor.h"

#include <cstddef>

namespace conclave::inline v0 {

struct ExpertInput {
  RowBundle rows;
  // The routing for dispatch and combine. If the rows carry the weights, each choice counts here as
  // a token of one choice and weight 1.
  Routing routing;
};

// `source` [T, W] at `to`, in the format that the experts want.
ExpertInput convert_expert_input(const ConstTensorView& source, const Routing& routing,
                                 const experts::BatchRequirements& wanted, std::byte* to,
                                 Executor& executor);

// The same with a row for each choice, multiplied by its weight in float32 before the one rounding
// to the kernel's row type. Writes T * k ones at `ones`.
ExpertInput weigh_expert_input(const ConstTensorView& source, const Routing& routing,
                               const experts::BatchRequirements& wanted, std::byte* to, float* ones,
                               Executor& executor);

}  // namespace conclave::inline v0
