// Limits that a call sets to its choices: checks of top_k, banned_experts and expert_budget.
#pragma once

#include "routing/limits.h"

#include "conclave/layer.h"
#include "conclave/spec.h"
#include "conclave/tensor.h"
#include "conclave/token_router.h"

#include <cstdint>

namespace conclave::inline v0 {

struct ChoiceLimits {
  int64_t top_k = 0;
  ConstTensorView banned_experts;
  int64_t expert_budget = 0;
  bool gives_ids = false;        // the call brings choices, nothing is left to choose
  ConstTensorView padding_mask;  // padding chooses nothing
  bool hides_bans = false;       // banned_experts lie in device memory: nobody looks at them

  static ChoiceLimits of(const ForwardArgs& args);
  static ChoiceLimits of(const RouteArgs& args);
  bool any() const { return top_k != 0 || !banned_experts.empty() || expert_budget != 0; }
};

// The flags as routers read them.
routing::Banned bans_of(const ConstTensorView& banned_experts);

// For a call of `rows` rows, of which the first `tokens` count. Throws Error naming the argument,
// what was found and the limit: kInvalidArgument for numbers out of range, and for a token that has
// fewer experts left than it chooses; kShape, kDType and so on for banned_experts; kUnsupported for
// a budget where choices are looked up. What device memory holds is not looked at.
void check_choice_limits(const ChoiceLimits& limits, const MoeSpec& spec, int64_t rows,
                         int64_t tokens);
// Throws Error(kUnsupported) if there are limits: a TokenRouter on a device has no memory for them.
void refuse_choice_limits(const ChoiceLimits& limits);

}  // namespace conclave::inline v0
