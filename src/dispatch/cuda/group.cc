#include "core/checked.h"
#include "dispatch/cuda/group_shape.h"

#include "conclave/error.h"

#include <algorithm>
#include <limits>
#include <string>

namespace conclave::inline v0::dispatch {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kMaxThreads = 1024;
// Measured on an H200 with 8 to 256 experts: the largest size at which each shape is the fastest.
constexpr int64_t kSlotsOfOneBlock = 768;
constexpr int64_t kSlotsOfSmallBlocks = 4096;
constexpr int64_t kSlotsOfCluster = 16384;
constexpr int64_t kSlotsOfFewBlocks = 65536;
constexpr int32_t kClusterBlocks = 8;  // every device with clusters can hold this many

size_t piece(int64_t count, size_t element_bytes, size_t& end) {
  const size_t begin = end;
  const auto bytes = static_cast<int64_t>(static_cast<size_t>(count) * element_bytes);
  end += static_cast<size_t>(round_up(bytes, kAlignment));
  return begin;
}

}  // namespace

GroupShape group_shape(int64_t slots, int64_t num_local_experts) {
  GroupShape shape;
  int64_t threads = kMaxThreads;
  if (slots <= kSlotsOfOneBlock) {
    threads = std::clamp<int64_t>(slots, 64, 256);
  } else if (slots <= kSlotsOfCluster) {
    threads = slots <= kSlotsOfSmallBlocks ? 256 : 512;
    shape.blocks = shape.cluster = kClusterBlocks;
  } else {
    // Every block reads the counts of all, so more blocks pay for themselves only late.
    shape.blocks = slots <= kSlotsOfFewBlocks ? kGroupMaxBlocks / 2 : kGroupMaxBlocks;
  }
  shape.threads =
      static_cast<int32_t>(round_up(std::max({threads, num_local_experts, int64_t{32}}), 32));
  shape.shared_bytes = group_shared_bytes(shape.threads, num_local_experts);
  return shape;
}

GroupLayout group_layout(int64_t num_tokens, int64_t top_k, int64_t num_local_experts,
                         int64_t tile_tokens) {
  const auto slots = checked_mul(num_tokens, top_k);
  constexpr int64_t kMaxSlots = std::numeric_limits<int32_t>::max();
  if (!slots || *slots > kMaxSlots) {
    throw Error(ErrorCode::kSizeOverflow,
                {.what = "slots are numbered in 32 bits",
                 .found = std::to_string(num_tokens) + " tokens x " + std::to_string(top_k),
                 .limit = std::to_string(kMaxSlots)});
  }
  if (num_local_experts > kMaxGroupExperts) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "too many local experts for one device",
                                              .found = std::to_string(num_local_experts),
                                              .limit = std::to_string(kMaxGroupExperts)});
  }
  GroupLayout layout;
  layout.max_rows = *slots;
  layout.max_tiles = max_token_tiles(*slots, num_local_experts, tile_tokens);
  layout.expert_begin = piece(num_local_experts + 1, sizeof(int32_t), layout.bytes);
  layout.num_tiles = piece(2, sizeof(int32_t), layout.bytes);
  layout.row_slot = piece(layout.max_rows, sizeof(int32_t), layout.bytes);
  layout.slot_row = piece(layout.max_rows, sizeof(int32_t), layout.bytes);
  layout.tiles = piece(layout.max_tiles, sizeof(TokenTile), layout.bytes);
  layout.block_counts = piece(num_local_experts * kGroupMaxBlocks, sizeof(uint32_t), layout.bytes);
  return layout;
}

size_t device_group_workspace_bytes(int64_t max_tokens, int64_t top_k, int64_t num_local_experts,
                                    int64_t tile_tokens) {
  return group_layout(max_tokens, top_k, num_local_experts, tile_tokens).bytes;
}

}  // namespace conclave::inline v0::dispatch
