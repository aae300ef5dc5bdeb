// What a mode of shared experts asks of a layer, on every device.
#pragma once

#include "conclave/spec.h"

namespace conclave::inline v0 {

struct SharedTraits {
  bool mixes = false;         // the routed sum has a factor as well
  bool weighs_rows = false;   // a weight for each shared expert's row, from the router or a slot
  bool reads_hidden = false;  // factors are products of the token's row
};

constexpr SharedTraits traits_of(SharedMode mode) {
  using enum SharedMode;
  return {.mixes = mode == kAverage || mode == kSoftmaxMix,
          .weighs_rows = mode == kRouterWeight || mode == kFusedSlots,
          .reads_hidden = mode == kSigmoidGate || mode == kSoftmaxMix};
}

}  // namespace conclave::inline v0
