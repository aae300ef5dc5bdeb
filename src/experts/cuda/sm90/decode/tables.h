// Tables that every block of the decode kernel derives from the ids, in shared memory. Pair t * k +
// s is token t's choice s; units are the distinct local experts, ascending.
#pragma once

#include "experts/cuda/sm90/decode/plan.h"

#include <cstdint>

namespace conclave::inline v0::experts {

struct DecodeTables {
  int32_t pair_expert[kDecodeMaxPairs];  // local expert, or -1
  float pair_weight[kDecodeMaxPairs];
  float pair_scale[kDecodeMaxPairs];      // the intermediate row's, if it has one
  uint32_t pair_tokens[kDecodeMaxPairs];  // the unit's tokens, at its first pair
  int32_t unit_expert[kDecodeMaxPairs];
  uint32_t unit_tokens[kDecodeMaxPairs];                 // one bit per token
  int32_t unit_row[kDecodeMaxPairs];                     // number of tokens in earlier units
  uint8_t unit_slot[kDecodeMaxPairs][kDecodeMaxTokens];  // the token's first with this expert
  float unit_weight[kDecodeMaxPairs][kDecodeMaxTokens];  // summed over such slots
  int32_t units;
  int32_t tiles[kDecodeTileSlots];        // items of the up product, in the block's order
  int32_t begun;                          // so many of them have been asked for
  uint32_t token_amax[kDecodeMaxTokens];  // bits of a non-negative float32
};

}  // namespace conclave::inline v0::experts
