// Lists the alternatives that a plan has for bringing rows to experts on the device.
#pragma once

#include "core/catalog.h"
#include "dispatch/cuda/group.h"
#include "dispatch/dispatcher.h"

#include "conclave/error.h"

#include <cstdint>
#include <string_view>
#include <vector>

namespace conclave::inline v0::dispatch {

// Decides which rows of which ranks a device's experts compute.
struct DeviceDispatcherRow {
  std::string_view name;    // "cuda.local"
  bool moves_rows = false;  // to the other ranks, over DispatchProblem::communicator
  Support (*supports)(const DispatchProblem& problem);
};
Catalog<DeviceDispatcherRow> device_dispatcher_catalog();

// The limits of a device's blocks; by default those of Hopper.
struct GroupLimits {
  int32_t cluster_blocks = 8;  // in a cluster; 1: there are none
  int64_t shared_bytes = int64_t{227} << 10;
};

struct DeviceGroupProblem {
  int64_t slots_per_token = 0;
  int64_t num_local_experts = 0;
  int64_t max_tokens = 0;
  GroupLimits limits = {};
};

// A way to group slots by expert; `shape` is that of the launch which places them. Rows are in
// order of the sizes that they suit.
struct DeviceGroupRow {
  std::string_view name;    // "cuda.group_block"
  int64_t most_slots = 0;   // largest call at which it is the fastest
  std::string_view reason;  // why it is the fastest there
  GroupShape (*shape)(int64_t slots, int64_t num_local_experts);
};
Catalog<DeviceGroupRow> device_group_catalog();
// Whether the row's largest shape for so many experts keeps to the limits.
Support supports(const DeviceGroupRow& row, int64_t num_local_experts, const GroupLimits& limits);

// Decides which launch checks ids that an earlier step or the caller made.
struct DeviceCheckRow {
  std::string_view name;  // "cuda.check_with_group"
  bool with_group = false;
  std::string_view reason;
};
Catalog<DeviceCheckRow> device_check_catalog();

// The choice for calls of up to `last_tokens` tokens, above those of the rung before.
struct GroupRung {
  int64_t last_tokens = 0;
  const DeviceGroupRow* row = nullptr;
  const DeviceCheckRow* check = nullptr;
  GroupLaunches launches;  // without `routed`
};
// Ascending, the last rung for max_tokens; neighbours that agree are one rung. Empty if calls of
// some size have no row that keeps to the limits.
std::vector<GroupRung> group_ladder(const DeviceGroupProblem& problem);

// The launches for one call on Hopper, as the ladder of a larger plan has them too.
GroupLaunches group_launches(int64_t num_tokens, int64_t slots_per_token,
                             int64_t num_local_experts);

}  // namespace conclave::inline v0::dispatch
