// The two parallel regions of an experts call as numbered items: (expert, block of rows, panel).
#pragma once

#include "core/flow.h"

#include <cstdint>
#include <span>

namespace conclave::inline v0::experts {

// One expert that has rows, and the numbers of its first items.
struct ActiveExpert {
  int64_t expert = 0;
  int64_t first_slot = 0;
  int64_t first_row = 0;  // counts occupied slots only, in the order of this list, with gaps that
                          // bring each expert to a multiple of RowTiling::group
  int64_t num_rows = 0;
  int64_t num_blocks = 0;
  int64_t first_block = 0;  // over all experts; item = block * panels + panel
};

// One item: a block of an expert's rows and the panel that multiplies it.
struct WorkItem {
  int64_t expert = 0;
  int64_t panel = 0;
  int64_t first_slot = 0;
  int64_t first_row = 0;
  int64_t num_rows = 0;
};

// How a kernel divides rows.
struct RowTiling {
  int64_t tile = 1;   // rows of a register tile: blocks end at multiples of it
  int64_t group = 1;  // rows that lie interleaved in memory; divides tile
  // The most rows of a block. 96 float32 rows of 2048 are 768 KiB: with two panels of weights they
  // fit a second-level cache of 2 MiB. Fewer rows would read the weights from memory more often.
  int64_t block = 96;
};

// Experts with the most rows come first, so that no long item starts when the others are done.
// Items that share rows follow each other panel by panel: the rows stay in the second-level cache.
class WorkList {
 public:
  // `storage` has one entry per local expert and must outlive the list.
  WorkList(const ExpertBatch& batch, const RowTiling& tiling, std::span<ActiveExpert> storage);

  int64_t num_blocks() const { return num_blocks_; }
  // first_row + num_rows of the last expert, rounded up to whole groups.
  int64_t num_rows() const { return num_rows_; }
  // The most that num_rows can be for a batch of `max_slots` occupied slots.
  static int64_t max_rows(int64_t max_slots, int64_t num_local_experts, const RowTiling& tiling);

  // A reader's place in the list; a reader asks for items in ascending order.
  struct Cursor {
    size_t active = 0;
  };
  WorkItem item(int64_t index, int64_t num_panels, Cursor& cursor) const;

 private:
  std::span<const ActiveExpert> active_;
  int64_t tile_rows_;
  int64_t num_blocks_ = 0;
  int64_t num_rows_ = 0;
};

}  // namespace conclave::inline v0::experts
