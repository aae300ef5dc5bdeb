// Limits of one call's choices on the device, as routing/limits.h has them on the host: they act on
// what a router reads and on what it has written.
#pragma once

#include "routing/cuda/bans.h"
#include "routing/cuda/device_router.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::routing {

// Copies the logits of `router` [T, num_logits] to `to`, dense float32, which may be the same
// memory; those of banned columns, and NaN, become -inf.
struct DeviceMaskArgs {
  DeviceRouterArgs router;  // logits, num_tokens and banned are read
  int64_t num_logits = 0;
  int64_t num_columns = 0;  // E + Z; columns behind them cannot be banned
  float* to = nullptr;
};
void mask_logits(const DeviceMaskArgs& args, CUstream_st* stream);

// Copies the first `few` of the `slots` ids of each token: [T, slots] to [T, few], apart from it.
void keep_first_slots(const int32_t* ids, int64_t num_tokens, int32_t slots, int32_t few,
                      int32_t* to, CUstream_st* stream);

// Moves rows of `from_slots` to rows of `slots`, in other memory: slots from `few` on, and those of
// banned experts, get id -1 and weight 0.
struct DeviceSlotLimits {
  const int32_t* ids = nullptr;    // [T, from_slots]
  const float* weights = nullptr;  // likewise
  int32_t from_slots = 0;
  int32_t few = 0;  // at most from_slots
  int32_t slots = 0;
  int64_t num_tokens = 0;
  int64_t num_columns = 0;  // E + Z
  DeviceBans banned = {};
  bool drops_weightless = false;  // as routing/limits.h has it
  int32_t* to_ids = nullptr;      // [T, slots] out
  float* to_weights = nullptr;    // likewise
  // A device counter, or null: each token that counts adds how many experts fewer than `few`
  // banned.rows leave it.
  uint64_t* missing_choices = nullptr;
  const int64_t* live_tokens = nullptr;  // device, or null
  const bool* padding_mask = nullptr;    // [T], or null
};
void limit_slots(const DeviceSlotLimits& args, CUstream_st* stream);

}  // namespace conclave::inline v0::routing
