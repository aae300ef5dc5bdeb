// What every block of the decode kernel works out for itself from the ids, in shared memory. A pair
// is token t's choice s, number t * k + s; a unit is one of the distinct local experts, ascending.
#pragma once

#include "experts/cuda/decode_plan.h"

#include <cstdint>

namespace conclave::inline v0::experts {

struct DecodeTables {
  int32_t pair_expert[kDecodeMaxPairs];  // local, or -1
  float pair_weight[kDecodeMaxPairs];
  float pair_scale[kDecodeMaxPairs];      // of an intermediate row, where it has one
  uint32_t pair_tokens[kDecodeMaxPairs];  // of the unit, at its first pair
  int32_t unit_expert[kDecodeMaxPairs];
  uint32_t unit_tokens[kDecodeMaxPairs];                 // a bit a token
  int32_t unit_row[kDecodeMaxPairs];                     // tokens of the units before
  uint8_t unit_slot[kDecodeMaxPairs][kDecodeMaxTokens];  // a token's first with this expert
  float unit_weight[kDecodeMaxPairs][kDecodeMaxTokens];  // of all its slots with this expert
  int32_t units;
  int32_t tiles[kDecodeTileSlots];        // of the up product, in the order of the block's work
  uint32_t token_amax[kDecodeMaxTokens];  // bits of a float32 that is not negative
};

}  // namespace conclave::inline v0::experts
