// A call on the CPU: the order of its chunks and of their stages.
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

// One chunk of a call.
struct PipelineArgs {
  const LayerPlan& plan;
  const PackedWeights& weights;
  const ForwardArgs& args;  // checked
  const PlacementEpoch& epoch;
  TokenChunk chunk;                // count <= plan.options.max_tokens
  std::span<std::byte> workspace;  // for this chunk alone
  Executor& executor;
};

// A whole call. All its chunks are in one epoch.
struct PipelineCall {
  const LayerPlan& plan;
  const PackedWeights& weights;
  const ForwardArgs& args;  // checked
  const PlacementEpoch& epoch;
  int64_t tokens = 0;
  int64_t chunks = 0;              // as the ranks agreed
  std::span<std::byte> workspace;  // plan.workspace_bytes
  Executor& executor;

  PipelineArgs chunk(int64_t index) const;
};

// Takes each chunk through its stages: in turn, or by twos, as the plan says. Allocates nothing.
// Collective over several ranks: an empty chunk takes part.
void run_chunks(const PipelineCall& call, ForwardCounters& counters);

}  // namespace conclave::inline v0
