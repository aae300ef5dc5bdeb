#include "fuzz/harness.h"
#include "fuzz/promises.h"
#include "trace/trace_file.h"

#include "conclave/safetensors.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

// Checks what a plan relies on.
void check_info(const tool::TraceInfo& info, const std::vector<TensorInfo>& tensors) {
  promise(info.num_experts >= 1 && info.num_zero_experts >= 0 && info.num_tokens >= 0);
  promise(info.top_k >= 1 && info.top_k <= info.num_experts + info.num_zero_experts);
  promise(!info.layers.empty() && std::ranges::is_sorted(info.layers));
  promise(std::ranges::adjacent_find(info.layers) == info.layers.end());
  promise(info.layers.size() <= tensors.size());
  promise(!info.batch_begin.empty() && info.batch_begin.front() == 0);
  promise(std::ranges::is_sorted(info.batch_begin));
  promise(info.batch_begin.back() == 0 || info.batch_begin.back() < info.num_tokens);
}

void check_ids(std::span<const std::byte> input, const TensorInfo& tensor,
               const tool::TraceInfo& info) {
  std::vector<int32_t> ids(static_cast<size_t>(info.num_tokens * info.top_k));
  promise(ids.size() * sizeof(int32_t) == tensor.bytes);
  if (ids.empty()) return;
  std::memcpy(ids.data(), input.data() + tensor.file_offset, tensor.bytes);
  tool::check_trace_ids(ids, info, 0, "fuzz.safetensors");
  const std::vector<int64_t> rows = tool::expert_rows(ids, info.num_experts);
  promise(static_cast<int64_t>(rows.size()) == info.num_experts);
}

}  // namespace

void fuzz_routing_trace(std::span<const std::byte> input) {
  expect_value_or_error([&] {
    std::map<std::string, std::string> metadata;
    const std::vector<TensorInfo> tensors =
        SafetensorsFile::parse_header(input, input.size(), "fuzz.safetensors", &metadata);
    const tool::TraceInfo info = tool::read_trace_info(tensors, metadata, "fuzz.safetensors");
    check_info(info, tensors);
    // A vector of rows for as many experts as metadata may name would say nothing more.
    if (info.num_experts > 1 << 16) return;
    for (const TensorInfo& tensor : tensors) {
      if (tensor.dtype == DType::kI32) check_ids(input, tensor, info);
    }
  });
}

}  // namespace conclave::testing
