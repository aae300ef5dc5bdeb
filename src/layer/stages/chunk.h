// A call on the CPU: the order of its chunks and of their stages.
#pragma once

#include "layer/adapters/adapter_set.h"
#include "layer/chunks.h"
#include "layer/kernel_counts.h"
#include "layer/packed_weights.h"
#include "layer/plan.h"

#include "conclave/layer.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace conclave::inline v0 {

// All chunks of a call are in one epoch.
struct HostCall {
  const LayerPlan& plan;
  const PackedWeights& weights;
  const ForwardArgs& args;  // checked
  const PlacementEpoch& epoch;
  const AdapterSet* adapters = nullptr;  // null: no row has one
  int64_t tokens = 0;
  int64_t chunks = 0;              // as the ranks agreed
  std::span<std::byte> workspace;  // plan.workspace_bytes
  Executor& executor;
};

// Takes each chunk through its stages: in turn, or by twos, as the plan says. Allocates nothing.
// Collective over several ranks: an empty chunk takes part.
KernelCounts run_chunks(const HostCall& call);

}  // namespace conclave::inline v0
