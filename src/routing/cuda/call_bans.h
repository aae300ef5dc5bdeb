// Bans that hold for all tokens of a call, and the sums of weights that a budget finds them by; as
// routing/expert_budget.h on the host.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::routing {

// Lies in a workspace, at the same place for all chunks of a call.
struct DeviceCallBans {
  // In units of 2^-40: high * 2^31 + low, [E] each, then the slots that named the expert, [E].
  uint64_t* sums = nullptr;
  uint8_t* left_out = nullptr;  // [E + Z]: not 0: banned for all tokens
  int32_t num_experts = 0;      // E
  int32_t num_columns = 0;      // E + Z

  static size_t bytes(int64_t num_experts, int64_t num_columns);
  static DeviceCallBans in(void* memory, int64_t num_experts, int64_t num_columns);
};

// Clears the sums and sets the flags: those of host memory, which are read before this returns, or
// none for null.
void begin_call_bans(const DeviceCallBans& bans, const uint8_t* host_flags, CUstream_st* stream);

// The choices of some of a call's tokens.
struct DeviceBudgetRows {
  const int32_t* ids = nullptr;    // [T, slots]; outside [0, E): count for nothing
  const float* weights = nullptr;  // likewise
  int64_t num_tokens = 0;
  int32_t slots = 0;
  const int64_t* live_tokens = nullptr;  // device, or null; later rows do not count
  const bool* padding_mask = nullptr;    // [T], or null; false: does not count
};
// Adds the weights of each expert up, exact to 2^-40, so that no order matters.
void add_expert_weights(const DeviceCallBans& bans, const DeviceBudgetRows& rows,
                        CUstream_st* stream);
// Bans all but the `budget` experts with the largest sums, of equal ones the lower id; no expert if
// the tokens have chosen no more than these.
void ban_beyond_budget(const DeviceCallBans& bans, int64_t budget, CUstream_st* stream);

}  // namespace conclave::inline v0::routing
