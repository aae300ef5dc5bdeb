// The shape of device_group: blocks, shared memory, workspace. Plain numbers.
#pragma once

#include "dispatch/cuda/group.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::dispatch {

inline constexpr int64_t kMaxGroupExperts = 1024;  // one thread per expert
inline constexpr int32_t kGroupTables = 5;         // words per expert, besides one count per warp
inline constexpr int32_t kGroupMaxBlocks = 64;     // for a shape that counts first

constexpr size_t group_shared_bytes(int32_t threads, int64_t num_local_experts) {
  return (static_cast<size_t>(threads) / 32 + kGroupTables) *
         static_cast<size_t>(num_local_experts) * sizeof(uint32_t);
}
inline constexpr int32_t kGroupMaxThreads = 1024;
// Every kernel may use this much without asking.
inline constexpr size_t kDefaultSharedBytes = size_t{48} * 1024;

// Kernels that group have some variables in shared memory beside what a launch asks for.
inline constexpr size_t kGroupOwnSharedBytes = 512;
constexpr bool dynamic_shared_fits(size_t bytes, int64_t shared_bytes_per_block) {
  return static_cast<int64_t>(bytes + kGroupOwnSharedBytes) <= shared_bytes_per_block;
}

// Offsets into the workspace.
struct GroupLayout {
  size_t expert_begin = 0;
  size_t num_tiles = 0;
  size_t row_slot = 0;
  size_t slot_row = 0;
  size_t tiles = 0;
  size_t block_counts = 0;  // [E, blocks] for a shape that counts first
  size_t bytes = 0;
  int64_t max_rows = 0;
  int64_t max_tiles = 0;
};

// Throws Error(kSizeOverflow) beyond 2^31 - 1 slots, which are numbered in 32 bits, and
// Error(kInvalidArgument) beyond kMaxGroupExperts local experts.
GroupLayout group_layout(int64_t num_tokens, int64_t top_k, int64_t num_local_experts,
                         int64_t tile_tokens);

}  // namespace conclave::inline v0::dispatch
