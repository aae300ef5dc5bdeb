// Turns ids into GroupedRows on the device.
#pragma once

#include "core/device_flow.h"

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::dispatch {

// One block; or a cluster, whose blocks tell each other their counts; or more blocks than a cluster
// holds, which read all counts from an earlier launch.
struct GroupShape {
  int32_t blocks = 1;
  int32_t threads = 128;
  int32_t cluster = 1;  // the number of blocks, or 1 without a cluster
  size_t shared_bytes = 0;

  bool counts_first() const { return cluster < blocks; }
  friend bool operator==(const GroupShape&, const GroupShape&) = default;
};

// The launches for a number of tokens, as a plan chooses them: dispatch/cuda/catalog.h.
struct GroupLaunches {
  GroupShape shape;         // for device_group
  bool checks_ids = false;  // device_sanitize_and_group does both in one launch of this shape
  // The shape in which a launch that routes groups as well; blocks 0: none does.
  GroupShape routed = {.blocks = 0};
  friend bool operator==(const GroupLaunches&, const GroupLaunches&) = default;
};

struct DeviceGroupArgs {
  GroupLaunches launches = {};
  // [T, k] logical ids: routing's, sanitize_ids' or the caller's own. Ids outside [0, num_experts)
  // have no expert.
  const int32_t* topk_ids = nullptr;
  // [T, k] instead of topk_ids, or null: the caller's int64 ids. narrow_ids [T, k] receives them as
  // int32, -1 for ids without an expert; rows beyond the live ones are not written.
  const int64_t* wide_ids = nullptr;
  int32_t* narrow_ids = nullptr;
  int64_t num_tokens = 0;                // T of the call
  const int64_t* live_tokens = nullptr;  // device, or null; if given, only the first *live_tokens
                                         // rows count
  int32_t top_k = 0;
  const int32_t* local_expert = nullptr;  // [num_experts] local expert or -1; null: the id itself
  int32_t num_experts = 0;
  int32_t num_local_experts = 0;
  int32_t tile_tokens = 0;
  int64_t* expert_load = nullptr;   // device counters, or null: rows are counted by id
  int32_t num_counted = 0;          // number of ids that expert_load counts; 0: num_experts
  uint64_t* skipped_ids = nullptr;  // device counter, or null: ids without an expert, except -1
  void* workspace = nullptr;        // device_group_workspace_bytes, 256-byte aligned
  // If there would be more than skewed_from tiles of tile_tokens rows, tiles have this many rows
  // instead and go to another kernel: GroupedRows::num_skewed_tiles. 0: never.
  int32_t skewed_tile_tokens = 0;
  int64_t skewed_from = 0;
};

// Enough for max_tokens tokens and the smaller of both tiles.
size_t device_group_workspace_bytes(int64_t max_tokens, int64_t top_k, int64_t num_local_experts,
                                    int64_t tile_tokens);
// Lets the kernels of device_group and device_sanitize_and_group use the shared memory that the
// shape needs. Called on the current device before its first use there.
void prepare_group_kernels(const GroupShape& shape);
// Enqueues one launch of a block or of a cluster, or, for many slots, two launches of many blocks.
// The result lies in the workspace. The order is stable and the same in every run. At most 1024
// local experts and 2^31 - 1 slots: Error otherwise.
GroupedRows device_group(const DeviceGroupArgs& args, CUstream_st* stream);

}  // namespace conclave::inline v0::dispatch
