// Places the pages of a large block on a machine with several memory nodes.
#pragma once

#include "conclave/device.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace conclave::inline v0::cpu {

// Bit n of word n / 64 stands for node n. An empty mask keeps the kernel's default: memory local to
// the thread that touches a page first.
struct InterleavePlan {
  std::vector<uint64_t> node_mask;
  int32_t max_node = 0;  // number of valid bits in the mask
};

// Pure. Blocks worth mapping on their own are read by the threads of all nodes, so their pages are
// dealt out over the nodes that have memory. With one such node there is nothing to do.
InterleavePlan plan_interleave(const std::vector<NumaNode>& nodes);

// Applies the plan to pages that are not touched yet. A refusal (a container without the right)
// leaves the default placement, which is slower but correct.
void apply_interleave(const InterleavePlan& plan, void* data, size_t bytes) noexcept;

}  // namespace conclave::inline v0::cpu
