// The run-time seam: the order of the stages for one chunk of tokens.
#pragma once

#include "layer/chunks.h"
#include "layer/packed_weights.h"
#include "layer/plan.h"

#include "conclave/layer.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace conclave::inline v0 {

// Counts that a forward adds to LayerStatus.
struct ForwardCounters {
  int64_t skipped_ids = 0;
  int64_t tokens_without_finite_logit = 0;
};

struct PipelineArgs {
  const LayerPlan& plan;
  const PackedWeights& weights;
  const ForwardArgs& args;  // checked
  const PlacementEpoch& epoch;
  TokenChunk chunk;  // count <= plan.options.max_tokens
  std::span<std::byte> workspace;
  Executor& executor;
};

class Pipeline {
 public:
  virtual ~Pipeline() = default;
  // Allocates nothing. Collective over several ranks: an empty chunk takes part.
  virtual void run(const PipelineArgs& args, ForwardCounters& counters) const = 0;
};

// Runs route, quantise, dispatch, experts, shared experts and combine one after the other.
class StagedPipeline final : public Pipeline {
 public:
  void run(const PipelineArgs& args, ForwardCounters& counters) const override;
};

}  // namespace conclave::inline v0
