#include "trace/record_trace.h"

#include "conclave/error.h"

#include <fmt/format.h>

namespace conclave::tool {
namespace {

std::string sizes_text(const TracedLayer& layer) {
  return fmt::format("E={} Z={} k={} T={}", layer.spec.num_experts, layer.spec.num_zero_experts,
                     layer.spec.top_k, layer.tokens);
}

}  // namespace

TraceInfo trace_info(const std::string& model, const std::string& model_type,
                     std::span<const TracedLayer> layers) {
  const TracedLayer& first = layers.front();
  TraceInfo info{.model = model,
                 .model_type = model_type,
                 .num_experts = first.spec.num_experts,
                 .num_zero_experts = first.spec.num_zero_experts,
                 .top_k = first.spec.top_k,
                 .num_tokens = first.tokens,
                 .layers = {},
                 .batch_begin = {0}};
  for (const TracedLayer& layer : layers) {
    if (sizes_text(layer) != sizes_text(first)) {
      throw Error(ErrorCode::kUnsupported,
                  {.what = fmt::format("layers {} and {} do not go into one trace", first.layer,
                                       layer.layer),
                   .tensor = "--trace",
                   .expected = sizes_text(first),
                   .found = sizes_text(layer),
                   .hint = "select layers of equal sizes with --layers"});
    }
    info.layers.push_back(layer.layer);
  }
  return info;
}

}  // namespace conclave::tool
