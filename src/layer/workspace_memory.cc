#include "layer/workspace_memory.h"

#include "cpu/topology.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <cstddef>

namespace conclave::inline v0 {
namespace {

// A look at the machine takes longer than planning a small layer, and so much is always there.
constexpr size_t kSmallBytes = size_t{64} << 20;

}  // namespace

void check_workspace_memory(const PlanBase& plan, int64_t memory_bytes) {
  const size_t bytes = plan.summary.workspace_bytes;
  if (memory_bytes <= 0 || bytes <= static_cast<size_t>(memory_bytes)) return;
  throw Error(ErrorCode::kOutOfMemory,
              {.what = "calls of so many tokens could have no workspace in memory",
               .tensor = "LayerOptions.max_tokens",
               .found = fmt::format("{}, for {} bytes", plan.options.max_tokens, bytes),
               .limit = fmt::format("{} bytes of memory", memory_bytes),
               .hint = "plan for fewer tokens; longer calls run in equal chunks"});
}

void check_workspace_memory(const PlanBase& plan) {
  if (plan.summary.workspace_bytes <= kSmallBytes) return;
  check_workspace_memory(plan, cpu::read_memory_size("/").total_bytes);
}

}  // namespace conclave::inline v0
