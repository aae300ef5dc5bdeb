#include "experts/cpu/work_list.h"

#include "core/checked.h"

#include <algorithm>

namespace conclave::inline v0::experts {
namespace {

// 96 float32 rows of 2048 are 768 KiB: with two panels of weights they fit a 2 MiB cache. Fewer
// rows would read the weights from memory more often.
constexpr int64_t kMaxBlockRows = 96;

}  // namespace

WorkList::WorkList(const ExpertBatch& batch, std::span<ActiveExpert> storage) {
  size_t count = 0;
  for (int64_t expert = 0; expert < batch.num_local_experts; ++expert) {
    const int64_t rows = batch.expert_count[expert];
    if (rows == 0) continue;
    storage[count++] = {.expert = expert,
                        .first_slot = batch.expert_begin[expert],
                        .num_rows = rows,
                        .num_blocks = ceil_div(rows, kMaxBlockRows)};
  }
  const std::span<ActiveExpert> active = storage.first(count);
  std::sort(active.begin(), active.end(), [](const ActiveExpert& a, const ActiveExpert& b) {
    return a.num_rows != b.num_rows ? a.num_rows > b.num_rows : a.expert < b.expert;
  });
  int64_t row = 0;
  for (ActiveExpert& expert : active) {
    expert.first_row = row;
    row += expert.num_rows;
    expert.first_block = num_blocks_;
    num_blocks_ += expert.num_blocks;
  }
  active_ = active;
}

WorkItem WorkList::item(int64_t index, int64_t num_panels, Cursor& cursor) const {
  const int64_t block = index / num_panels;
  while (block >= active_[cursor.active].first_block + active_[cursor.active].num_blocks) {
    ++cursor.active;
  }
  const ActiveExpert& expert = active_[cursor.active];
  // Blocks of nearly equal size: the first `longer` ones have a row more.
  const int64_t position = block - expert.first_block;
  const int64_t rows = expert.num_rows / expert.num_blocks;
  const int64_t longer = expert.num_rows % expert.num_blocks;
  const int64_t offset = position * rows + std::min(position, longer);
  return {.expert = expert.expert,
          .panel = index % num_panels,
          .first_slot = expert.first_slot + offset,
          .first_row = expert.first_row + offset,
          .num_rows = rows + (position < longer ? 1 : 0)};
}

}  // namespace conclave::inline v0::experts
