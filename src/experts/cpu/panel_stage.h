// One of the two products of a batch: its panels times blocks of rows, shared among workers.
#pragma once

#include "experts/cpu/work_list.h"
#include "experts/slab_layout.h"

#include "conclave/context.h"

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::experts {

// A stage's panels in memory; null where experts do not lie in slabs.
struct PanelStage {
  Slabs slabs;
  const SlabPlaces& places;
  int64_t num_panels = 0;

  const std::byte* panel(const WorkItem& item) const {
    return places.panel(places.slab(slabs, item.expert), item.panel);
  }
};

// Hands items out one by one. Each worker takes its next item before it runs the current one, so
// that the next item's weights can be fetched from memory meanwhile. The body is given both.
template <class Body>
void run_stage(Executor& executor, const WorkList& work, const PanelStage& stage,
               const Body& body) {
  struct State {
    std::atomic<int64_t> next{0};
    int64_t num_items;
    const WorkList* work;
    const PanelStage* stage;
    const Body* body;
  } state{{}, work.num_blocks() * stage.num_panels, &work, &stage, &body};
  if (state.num_items == 0) return;
  executor.run({.invoke =
                    [](void* opaque, int32_t worker) noexcept {
                      auto& shared = *static_cast<State*>(opaque);
                      WorkList::Cursor cursor;
                      const auto take = [&](WorkItem& item) {
                        const int64_t index = shared.next.fetch_add(1, std::memory_order_relaxed);
                        if (index >= shared.num_items) return false;
                        item = shared.work->item(index, shared.stage->num_panels, cursor);
                        return true;
                      };
                      WorkItem item;
                      bool taken = take(item);
                      while (taken) {
                        WorkItem next;
                        taken = take(next);
                        (*shared.body)(worker, item, taken ? &next : nullptr);
                        item = next;
                      }
                    },
                .state = &state});
}

}  // namespace conclave::inline v0::experts
