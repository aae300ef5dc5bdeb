#include "layer/cuda/every_row.h"

#include "cuda/check.h"

#include "conclave/interop/cuda.h"

#include <algorithm>
#include <cstddef>
#include <cuda_runtime_api.h>
#include <optional>
#include <vector>

namespace conclave::inline v0 {
namespace {

DeviceMemory ids_of(const Context& context, const std::optional<CudaMlpPlan>& part, int64_t tokens,
                    Stream stream) {
  if (!part) return {};
  const int64_t experts = part->problem.top_k;
  std::vector<int32_t> ids(static_cast<size_t>(tokens * experts));
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int32_t>(static_cast<int64_t>(i) % experts);
  }
  DeviceMemory memory(*context.device_allocator(), ids.size() * sizeof(int32_t), stream,
                      "ids of every row");
  cuda::check(cudaMemcpyAsync(memory.as(), ids.data(), memory.bytes(), cudaMemcpyHostToDevice,
                              to_cuda(stream)),
              "cudaMemcpyAsync");
  cuda::check(cudaStreamSynchronize(to_cuda(stream)), "cudaStreamSynchronize");
  return memory;
}

}  // namespace

EveryRowIds make_every_row(const Context& context, const CudaPlan& plan, Stream stream) {
  const int64_t tokens = std::max(plan.options.max_tokens, MoeLayer::kReplannedTokens);
  return {.shared = ids_of(context, plan.shared, tokens, stream),
          .residual = ids_of(context, plan.residual, tokens, stream),
          .tokens = tokens};
}

bool serves(const EveryRowIds& ids, const CudaPlan& plan) {
  return (!plan.shared && !plan.residual) || plan.options.max_tokens <= ids.tokens;
}

}  // namespace conclave::inline v0
