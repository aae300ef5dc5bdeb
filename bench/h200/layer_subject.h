// A public MoeLayer on the GPU over the weights of a test problem, and its measurements.
#pragma once

#include "support/cuda/cuda_problem.h"
#include "support/cuda/guarded_device.h"

#include "conclave/context.h"
#include "conclave/layer.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace conclave::bench {

enum class RoutingInput : uint8_t { kIds, kLogits };

struct Measurement {
  double microseconds = 0;  // median per forward
  int32_t routings = 1;
  int32_t replays = 0;
  testing::RowErrors errors = {};
  int64_t damage = 0;  // changed canary bytes around workspace and output
};

class LayerSubject {
 public:
  // Weights stay in the memory of `problem`; `max_tokens` covers every T.
  LayerSubject(const Context& context, testing::CudaProblem& problem, int64_t max_tokens,
               Determinism determinism);

  // Times the problem's present batch in a graph, then runs it once more into poisoned memory and
  // compares the result with float64.
  Measurement measure(RoutingInput input, double seconds);
  const Plan& plan() const { return layer_.plan(); }
  size_t workspace_bytes() const { return layer_.workspace_bytes(); }

 private:
  void forward(RoutingInput input, int32_t routing, CUstream_st* stream);

  testing::CudaProblem& problem_;
  MoeLayer layer_;
  testing::GuardedDevice workspace_memory_;
  std::optional<Workspace> workspace_;
  std::optional<testing::GuardedDevice> out_;
  cuda::DeviceBuffer logits_;  // [routings, T, E]
};

}  // namespace conclave::bench
