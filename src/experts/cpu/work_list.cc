#include "experts/cpu/work_list.h"

#include "core/checked.h"

#include <algorithm>

namespace conclave::inline v0::experts {
WorkList::WorkList(const ExpertBatch& batch, const RowTiling& tiling,
                   std::span<ActiveExpert> storage)
    : tile_rows_(tiling.tile) {
  size_t count = 0;
  for (int64_t expert = 0; expert < batch.num_local_experts; ++expert) {
    const int64_t rows = batch.expert_count[expert];
    if (rows == 0) continue;
    storage[count++] = {.expert = expert,
                        .first_slot = batch.expert_begin[expert],
                        .num_rows = rows,
                        .num_blocks = ceil_div(rows, tiling.block)};
  }
  const std::span<ActiveExpert> active = storage.first(count);
  std::sort(active.begin(), active.end(), [](const ActiveExpert& a, const ActiveExpert& b) {
    return a.num_rows != b.num_rows ? a.num_rows > b.num_rows : a.expert < b.expert;
  });
  for (ActiveExpert& expert : active) {
    expert.first_row = num_rows_;
    num_rows_ += round_up(expert.num_rows, tiling.group);
    expert.first_block = num_blocks_;
    num_blocks_ += expert.num_blocks;
  }
  active_ = active;
}

int64_t WorkList::max_rows(int64_t max_slots, int64_t num_local_experts, const RowTiling& tiling) {
  return max_slots + std::min(max_slots, num_local_experts) * (tiling.group - 1);
}

WorkItem WorkList::item(int64_t index, int64_t num_panels, Cursor& cursor) const {
  const int64_t block = index / num_panels;
  while (block >= active_[cursor.active].first_block + active_[cursor.active].num_blocks) {
    ++cursor.active;
  }
  const ActiveExpert& expert = active_[cursor.active];
  // Blocks have nearly equal numbers of tiles: the first `longer` ones have one tile more.
  const int64_t num_tiles = ceil_div(expert.num_rows, tile_rows_);
  const int64_t position = block - expert.first_block;
  const int64_t tiles = num_tiles / expert.num_blocks;
  const int64_t longer = num_tiles % expert.num_blocks;
  const int64_t offset = (position * tiles + std::min(position, longer)) * tile_rows_;
  const int64_t rows = (tiles + (position < longer ? 1 : 0)) * tile_rows_;
  return {.expert = expert.expert,
          .panel = index % num_panels,
          .first_slot = expert.first_slot + offset,
          .first_row = expert.first_row + offset,
          .num_rows = std::min(rows, expert.num_rows - offset)};
}

}  // namespace conclave::inline v0::experts
