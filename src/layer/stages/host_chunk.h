// One chunk of a call on the CPU, on its way through the stages.
#pragma once

#include "dispatch/dispatcher.h"
#include "dispatch/unpermute_reduce.h"
#include "layer/chunks.h"
#include "layer/kernel_counts.h"
#include "layer/stages/chunk.h"
#include "layer/stages/gate.h"
#include "layer/stages/host_stages.h"
#include "layer/stages/input.h"
#include "layer/stages/padding.h"
#include "layer/stages/shared.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0 {

// Each step names what its stage reads; results that a later one reads are members here.
class HostChunk {
 public:
  HostChunk(const HostCall& call, int64_t index)
      : plan_(call.plan),
        weights_(call.weights),
        epoch_(call.epoch),
        executor_(call.executor),
        at_(chunk_at(call.tokens, call.chunks, index)),
        args_(chunk_of(call.args, at_)),
        padding_(args_.padding_mask),
        scratch_(workspace_of(call, index), call.plan.slices) {}

  // Routes the chunk and sends its rows off.
  void begin(KernelCounts& counts);
  // Runs the experts on the rows that came, sends the results home, and while these travel runs
  // what every rank computes for its own tokens.
  void run();
  // Takes the results and writes the chunk's rows of `out`.
  void finish();

 private:
  static std::byte* workspace_of(const HostCall& call, int64_t index) {
    const bool by_twos = call.plan.chunk_order == ChunkOrder::kByTwos;
    const size_t half = by_twos ? static_cast<size_t>(index % 2) : 0;
    return call.workspace.data() + half * call.plan.chunk_workspace_bytes;
  }

  bool runs_gate() const {
    return args_.topk_weights.empty() && args_.router_logits.empty() && plan_.spec.has_gate;
  }
  void convert_hidden();
  RowBundle gate_rows(const Gate& gate) const;
  const float* logits() const;
  KernelCounts route_tokens();
  ExpertInput expert_input() const;
  void run_experts();
  dispatch::CombineArgs combine_args() const;
  const float* run_shared() const;
  const float* run_residual() const;
  const float* sum_ranks(const float* rows, HostBuffer to) const;
  const float* hand_out(const float* shared) const;
  dispatch::FinishArgs terms() const;
  dispatch::UnpermuteArgs routed_sums() const;

  const LayerPlan& plan_;
  const PackedWeights& weights_;
  const PlacementEpoch& epoch_;
  Executor& executor_;
  TokenChunk at_;
  ForwardArgs args_;  // the chunk's rows
  Padding padding_;
  HostScratch scratch_;

  RowBundle hidden_;         // as kernels of width H read it; empty if none does
  RowBundle hidden_floats_;  // in float32; empty if nothing reads it
  Routing routing_;          // from the router: its weights count for zero experts
  Routing dispatched_;       // as given to dispatch
  ExpertOutput output_;
  SumFactors factors_;
  const float* shared_ = nullptr;    // [T, H] to add, or null
  const float* residual_ = nullptr;  // the same
};

}  // namespace conclave::inline v0
