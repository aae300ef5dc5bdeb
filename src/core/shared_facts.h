// The facts that follow from a mode of shared experts, on every device. Nothing else tells modes
// apart: checks, weights, plans, stages and the reference read these facts.
#pragma once

#include "conclave/spec.h"

#include <cstdint>
#include <string_view>

namespace conclave::inline v0 {

// The source of a token's factors of its shared experts.
enum class SharedFactor : uint8_t {
  kNone,     // they are 1
  kSigmoid,  // a gate on the token
  kHalf,     // routed and shared part count half each
  kSoftmax,  // a gate with two columns: for the routed and for the shared part
  kRouter,   // the router weighs shared experts
  kSlot,     // shared experts are slots behind those of the router
};

struct SharedFacts {
  bool is_there = true;  // the layer has shared experts
  SharedFactor factor = SharedFactor::kNone;
  std::string_view text = "added";  // how they join the sum, for `explain`

  // The routed sum has a factor as well.
  constexpr bool mixes() const {
    return factor == SharedFactor::kHalf || factor == SharedFactor::kSoftmax;
  }
  // Each shared expert's row has a weight, so that there may be several.
  constexpr bool weighs_rows() const { return by_router() || has_slots(); }
  // The factors are products of the token's row.
  constexpr bool reads_hidden() const { return has_sigmoid_gate() || has_mix_gate(); }

  constexpr bool has_sigmoid_gate() const { return factor == SharedFactor::kSigmoid; }
  constexpr bool has_mix_gate() const { return factor == SharedFactor::kSoftmax; }
  constexpr bool by_router() const { return factor == SharedFactor::kRouter; }  // from S logits
  constexpr bool has_slots() const { return factor == SharedFactor::kSlot; }
};

constexpr SharedFacts shared_facts(SharedMode mode) {
  switch (mode) {
    case SharedMode::kNone:
      return {.is_there = false};
    case SharedMode::kAdd:
      break;
    case SharedMode::kSigmoidGate:
      return {.factor = SharedFactor::kSigmoid, .text = "by sigmoid gate"};
    case SharedMode::kAverage:
      return {.factor = SharedFactor::kHalf, .text = "averaged"};
    case SharedMode::kSoftmaxMix:
      return {.factor = SharedFactor::kSoftmax, .text = "by softmax mix"};
    case SharedMode::kRouterWeight:
      return {.factor = SharedFactor::kRouter, .text = "by router weights"};
    case SharedMode::kFusedSlots:
      return {.factor = SharedFactor::kSlot, .text = "by slot weights"};
  }
  return {};
}
constexpr SharedFacts shared_facts(const SharedExpertSpec& shared) {
  return shared_facts(shared.mode);
}
constexpr SharedFacts shared_facts(const MoeSpec& spec) { return shared_facts(spec.shared); }

// Slots of a token behind those of the router, and columns of logits behind those of experts.
constexpr int64_t num_shared_slots(const MoeSpec& spec) {
  return shared_facts(spec).has_slots() ? spec.shared.count : 0;
}
constexpr int64_t num_shared_logits(const MoeSpec& spec) {
  return shared_facts(spec).by_router() ? spec.shared.count : 0;
}

}  // namespace conclave::inline v0
