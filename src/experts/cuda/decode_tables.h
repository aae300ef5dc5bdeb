// What every block of the decode kernel works out for itself from the ids, in shared memory. A pair
// is token t's choice s, number t * k + s.
#pragma once

#include "experts/cuda/decode_plan.h"

#include <cstdint>

namespace conclave::inline v0::experts {

struct DecodeTables {
  int32_t pair_expert[kDecodeMaxPairs];  // local, or -1
  float pair_weight[kDecodeMaxPairs];
  float pair_scale[kDecodeMaxPairs];                    // of an intermediate row, where it has one
  int16_t pair_source[kDecodeMaxPairs];                 // the token's first pair with this expert
  int32_t unit_expert[kDecodeMaxPairs];                 // the distinct experts
  int8_t unit_slot[kDecodeMaxPairs][kDecodeMaxTokens];  // a token's slot with it, or -1
  int32_t warp_units[kDecodeWarps];
  uint32_t token_amax[kDecodeMaxTokens];  // bits of a float32 that is not negative
};

}  // namespace conclave::inline v0::experts
