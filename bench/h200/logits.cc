#include "logits.h"

#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace conclave::bench {

cuda::DeviceBuffer make_logits(const testing::CudaProblem& problem) {
  const testing::CudaProblemOptions& o = problem.options();
  const auto experts = static_cast<size_t>(o.num_experts);
  const auto k = static_cast<size_t>(o.top_k);
  std::mt19937 random(7);
  std::vector<float> logits;
  for (int32_t routing = 0; routing < o.routings; ++routing) {
    const size_t begin = logits.size();
    logits.resize(begin + static_cast<size_t>(o.num_tokens) * experts);
    for (size_t at = begin; at < logits.size(); ++at) {
      logits[at] = -12.0F + 4.0F * static_cast<float>(random() >> 8) * 0x1p-24F;
    }
    const auto ids = problem.host_ids(routing);
    const auto weights = problem.host_weights(routing);
    for (size_t slot = 0; slot < ids.size(); ++slot) {
      logits[begin + slot / k * experts + static_cast<size_t>(ids[slot])] = std::log(weights[slot]);
    }
  }
  cuda::DeviceBuffer buffer(logits.size() * sizeof(float));
  cuda::upload(std::span<const float>(logits), buffer.data());
  return buffer;
}

}  // namespace conclave::bench
