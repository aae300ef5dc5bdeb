// A router given by values, as plain numbers for the device.
#pragma once

#include "routing/score.h"
#include "routing/topk/choose.h"
#include "routing/weigh.h"

#include "conclave/spec.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::routing {

inline constexpr int64_t kMaxDeviceColumns = 1024;  // 32 per lane
// Slots of a token that lie in registers, one per lane; more of them lie in shared memory.
inline constexpr int64_t kLaneSlots = 32;

// Says whether a row's choices are made here, or given and only weighed.
enum class Choices : uint8_t { kMade, kGiven };

struct DeviceRouteRule {
  ScoreRule score;
  WeighRule weigh;
  ChooseRule choose;
  int32_t num_columns = 0;  // E + Z
  int32_t num_experts = 0;
  int32_t top_k = 0;
  bool by_logit = false;        // chosen by float32 logits alone, without groups
  bool float_keys = false;      // false: scores are compared in double from the start
  bool resolves_close = false;  // close candidates can be compared one by one in double
  int32_t num_candidates = 0;   // columns taken by float32 keys: k and a few more
  bool softmax_all = false;     // a softmax over all columns is part of the score
  int32_t slot_lanes = 1;       // top_k rounded up to a power of two
  int32_t group_size = 0;       // columns; 0: no groups
  int32_t group_stride = 0;     // in shared memory; two groups' lanes read different banks
  int32_t lanes_a_group = 1;    // a power of two
  int32_t group_lanes = 0;      // lanes that hold just one group, a power of two; or 0
  // c / group_size = (c * group_inverse) >> 20 for every column c.
  uint32_t group_inverse = 0;
};

DeviceRouteRule device_route_rule(const MoeSpec& spec, Choices choices);

// Doubles of shared memory per warp: keys, and two words per group.
constexpr int32_t route_scratch_doubles(const DeviceRouteRule& rule) {
  if (rule.group_size == 0) return 0;
  return rule.num_columns / rule.group_size * (rule.group_stride + 2);
}
// The same beyond kLaneSlots: keys, which scores of slots replace, and the slots' columns. Groups
// are done with when these come.
constexpr int32_t wide_scratch_doubles(const DeviceRouteRule& rule) {
  const int32_t slots = rule.num_columns + (rule.top_k + 1) / 2;
  const int32_t groups = route_scratch_doubles(rule);
  return slots > groups ? slots : groups;
}
// Columns per lane, one of 1, 2, 4, 8, 16, 32: the kernels are instantiated for these.
int32_t columns_a_lane(const DeviceRouteRule& rule);

}  // namespace conclave::inline v0::routing
