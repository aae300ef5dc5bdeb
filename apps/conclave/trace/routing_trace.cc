#include "trace/routing_trace.h"

namespace conclave::tool {

std::vector<int64_t> expert_rows(std::span<const int32_t> ids, int64_t num_experts) {
  std::vector<int64_t> rows(static_cast<size_t>(num_experts), 0);
  for (const int32_t id : ids) {
    if (id >= 0 && id < num_experts) ++rows[static_cast<size_t>(id)];
  }
  return rows;
}

}  // namespace conclave::tool
