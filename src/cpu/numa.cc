#include "cpu/numa.h"

#include <algorithm>
#include <sys/syscall.h>
#include <unistd.h>

namespace conclave::inline v0::cpu {

InterleavePlan plan_interleave(const std::vector<NumaNode>& nodes) {
  InterleavePlan plan;
  int32_t with_memory = 0;
  for (const NumaNode& node : nodes) {
    if (node.memory_bytes <= 0 || node.id < 0) continue;
    const auto word = static_cast<size_t>(node.id) / 64;
    if (plan.node_mask.size() <= word) plan.node_mask.resize(word + 1);
    plan.node_mask[word] |= uint64_t{1} << (node.id % 64);
    plan.max_node = std::max(plan.max_node, node.id + 1);
    ++with_memory;
  }
  return with_memory > 1 ? plan : InterleavePlan{};
}

void apply_interleave(const InterleavePlan& plan, void* data, size_t bytes) noexcept {
  if (plan.node_mask.empty()) return;
  constexpr int kMpolInterleave = 3;
  // The kernel reads one bit less than the number it is given.
  syscall(SYS_mbind, data, bytes, kMpolInterleave, plan.node_mask.data(), plan.max_node + 1, 0);
}

}  // namespace conclave::inline v0::cpu
