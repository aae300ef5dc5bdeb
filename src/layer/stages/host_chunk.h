// One chunk of a call on the CPU, on its way through the stages.
#pragma once

#include "dispatch/dispatcher.h"
#include "dispatch/unpermute_reduce.h"
#include "layer/choice_limits.h"
#include "layer/chunks.h"
#include "layer/kernel_counts.h"
#include "layer/stages/chunk.h"
#include "layer/stages/gate.h"
#include "layer/stages/host_stages.h"
#include "layer/stages/input.h"
#include "layer/stages/padding.h"
#include "layer/stages/route.h"
#include "layer/stages/shared.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0 {

// Each stage takes the buffers that the plan's list gives it, is handed what it reads and returns
// what it makes. What a later part of the walk reads waits in `results_`, since two chunks may be
// under way.
class HostChunk {
 public:
  HostChunk(const HostCall& call, int64_t index)
      : plan_(call.plan),
        weights_(call.weights),
        epoch_(call.epoch),
        adapters_(call.adapters),
        executor_(call.executor),
        fills_wait_(call.plan.fills_wait == FillsWait::kForRows || index % 2 == 0),
        at_(chunk_at(call.tokens, call.chunks, index)),
        args_(chunk_of(call.args, at_)),
        padding_(args_.padding_mask),
        bans_(bans_of(args_.banned_experts)),
        scratch_(workspace_of(call, index), call.plan.slices, {}, &turns_) {}
  HostChunk(const HostChunk&) = delete;
  HostChunk& operator=(const HostChunk&) = delete;
  ~HostChunk() = default;

  // Routes the chunk and leaves it at that, for calls that look at all choices first.
  Routing route_only();
  // Routes the chunk and sends its rows off.
  void begin(KernelCounts& counts);
  // Runs the experts on the rows that came and sends the results home. What every rank computes for
  // its own tokens runs while the results travel, or before, as the plan says.
  void run();
  // Takes the results and writes the chunk's rows of `out`.
  void finish();

 private:
  static std::byte* workspace_of(const HostCall& call, int64_t index) {
    const bool by_twos = call.plan.chunk_order != ChunkOrder::kInTurn;
    const size_t half = by_twos ? static_cast<size_t>(index % 2) : 0;
    return call.workspace.data() + half * call.plan.chunk_workspace_bytes;
  }

  // The hidden rows of the chunk; a bundle is empty if nothing reads it.
  struct Hidden {
    RowBundle rows;    // as kernels of width H read them
    RowBundle floats;  // in float32
  };
  struct Results {
    Hidden hidden;
    Routing routing;     // from the router: its weights count for zero experts
    Routing dispatched;  // as given to dispatch
    ExpertOutput output;
    SumFactors factors;
    const float* shared = nullptr;    // [T, H] to add, or null
    const float* residual = nullptr;  // the same
  };

  bool runs(HostStage stage) const { return plan_.stages.has(stage); }
  HostScratch at(HostStage stage) const { return scratch_.only(plan_.stages.buffers_of(stage)); }
  bool runs_gate() const {
    return args_.topk_weights.empty() && args_.router_logits.empty() && plan_.spec.has_gate;
  }

  std::span<const experts::MlpAdapter* const> routed_adapters() const;
  std::span<const experts::MlpAdapter* const> shared_adapters() const;
  void mark_rows(const RowBundle& rows, std::byte* memory, int64_t rows_per_token) const;
  Hidden convert_hidden(const HostScratch& own) const;
  RowBundle gate_rows(const HostScratch& own, const Gate& gate, const Hidden& hidden) const;
  const float* logits(const HostScratch& own, const Hidden& hidden) const;
  const float* limited_logits(const HostScratch& own, const float* logits) const;
  const Router& router() const;
  RouteResult route_tokens(const HostScratch& own, const Hidden& hidden) const;
  ExpertInput expert_input(const HostScratch& own, const Hidden& hidden,
                           const Routing& routing) const;
  Routing send_rows(const HostScratch& own, const ExpertInput& input) const;
  bool awaits_rows(const HostScratch& own) const;
  ExpertOutput run_experts(const HostScratch& own) const;
  dispatch::CombineArgs combine_args(const HostScratch& own) const;
  void send_results(const HostScratch& own) const;
  SumFactors factors(const HostScratch& own) const;
  const float* run_shared(const HostScratch& own) const;
  const float* run_residual(const HostScratch& own) const;
  const float* sum_ranks(const HostScratch& own, const float* rows, HostBuffer to) const;
  const float* hand_out(const float* shared) const;
  void run_own_parts();
  dispatch::FinishArgs terms(const HostScratch& own) const;
  dispatch::UnpermuteArgs routed_sums() const;

  const LayerPlan& plan_;
  const PackedWeights& weights_;
  const PlacementEpoch& epoch_;
  const AdapterSet* adapters_;
  Executor& executor_;
  bool fills_wait_;  // for rows, if the plan has that
  TokenChunk at_;
  ForwardArgs args_;  // the chunk's rows
  Padding padding_;
  routing::Banned bans_;
  BufferTurns turns_;
  HostScratch scratch_;
  Results results_;
};

}  // namespace conclave::inline v0
