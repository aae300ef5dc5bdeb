#include "core/checked.h"
#include "dispatch/cuda/group_shape.h"

#include "conclave/error.h"

#include <limits>
#include <string>

namespace conclave::inline v0::dispatch {
namespace {

constexpr int64_t kAlignment = 256;

size_t piece(int64_t count, size_t element_bytes, size_t& end) {
  const size_t begin = end;
  const auto bytes = static_cast<int64_t>(static_cast<size_t>(count) * element_bytes);
  end += static_cast<size_t>(round_up(bytes, kAlignment));
  return begin;
}

}  // namespace

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
