// The seam between a layer and the kind of device that runs it.
#pragma once

#include "core/device.h"
#include "core/rank_counts.h"
#include "layer/adapters/adapter_set.h"
#include "layer/device_runtime.h"
#include "layer/kernel_counts.h"
#include "layer/migration/movable_experts.h"
#include "layer/plan_base.h"
#include "layer/refit/engine_refit.h"
#include "layer/refit/forward_gate.h"
#include "layer/regroup/peer_weights.h"

#include "conclave/error.h"
#include "conclave/layer.h"
#include "conclave/token_router.h"
#include "conclave/tuning.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

// A layer's weights where its device reads them. Layers that differ only in the number of tokens
// that they plan for share them.
class LayerWeights {
 public:
  virtual ~LayerWeights() = default;
  // The experts that the next load or fill packs, by place, -1 for a free one; empty: as planned.
  std::vector<int32_t> experts;
};

// A call whose arguments are checked.
struct LayerCall {
  const ForwardArgs& args;
  int64_t tokens = 0;
  int64_t chunks = 0;  // as the ranks agreed
  std::span<std::byte> workspace;
  const PlacementEpoch* epoch = nullptr;  // as the ranks agreed
  RankCounts rank_tokens = {};            // one for each rank, where rows gather on a device
  const AdapterSet* adapters = nullptr;   // null: no row of the call has one
};

// A plan bound to weights. Immutable, so that concurrent calls need only distinct workspaces.
class LayerRunner {
 public:
  virtual ~LayerRunner() = default;
  // Works as MoeLayer::workspace_bytes.
  virtual size_t workspace_bytes(int64_t tokens) const = 0;
  // Throws Error(kWorkspaceTooSmall) before ranks agree on a call; `run` throws it where the bytes
  // needed depend on the chunks.
  virtual void check_workspace(std::span<const std::byte> workspace) const = 0;
  // Runs all chunks, or enqueues them. Allocates nothing.
  virtual void run(const LayerCall& call) const = 0;
};

// A kind of device adds this to a layer: its plan, weights in its memory, and calls on both.
// `Layer` does the rest, alike for every device.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual const PlanBase& plan() const noexcept = 0;
  // The same for another number of tokens. Collective, as ranks must agree on it.
  virtual std::unique_ptr<Engine> with_max_tokens(int64_t max_tokens) const = 0;

  // Throws as MoeLayer::forward for an argument; returns the number of tokens.
  virtual int64_t check(const ForwardArgs& args) const = 0;
  // Throws for weights that lie where this device cannot read them.
  virtual void check_place(const WeightSource& source) const = 0;

  // Loads a checked source. Counters of `replaced`, if given, carry over.
  virtual std::unique_ptr<LayerWeights> load(const WeightSource& source,
                                             const LayerWeights* replaced) const = 0;
  // Throws before `fill` overwrites anything if weights that a layer does not own differ.
  virtual void check_fill(const WeightSource& /*source*/, const LayerWeights& /*weights*/) const {}
  // Overwrites weights in place.
  virtual void fill(const WeightSource& source, LayerWeights& weights) const = 0;
  virtual KernelCounts counts(const LayerWeights& weights) const = 0;
  // Makes what runs on `weights`. Memory that depends on neither the weights nor the plan is shared
  // with `like`, a runner on the same weights, if given.
  virtual std::unique_ptr<LayerRunner> bind(LayerWeights& weights,
                                            const LayerRunner* like) const = 0;

  // Whether experts may lie in other places than planned, or why not.
  virtual Support moves_experts(const LayerWeights& /*weights*/) const {
    return Support::no("on this device they stay where they were loaded");
  }
  // True if other layers read the same memory, as one does that was taken to other ranks.
  virtual bool shares_memory(const LayerWeights& /*weights*/) const { return false; }
  // Ends that, by a copy: the weights may be changed then. Not beside forwards on them.
  virtual void make_own(LayerWeights& /*weights*/) const {}
  // For those whose experts move. What it returns lives as long as this, the weights and the gate.
  virtual MovableExperts movable(LayerWeights& /*weights*/, ForwardGate& /*gate*/) const {
    return {};
  }
  // Whether a call may take up another placement epoch, as the host must know it before.
  virtual bool may_switch(const ForwardArgs& /*args*/) const { return true; }
  // A call does: what is enqueued on its stream from now on reads the experts' places of `next`.
  virtual void enter_epoch(LayerWeights& /*weights*/, const PlacementEpoch& /*next*/,
                           Stream /*stream*/) const {}
  // The same for other ranks. Collective. Without a source, weights lie as they do now. Throws
  // Error(kUnsupported) where this device needs a source.
  virtual std::unique_ptr<Engine> on_ranks(const Context& context, const ParallelSpec& parallel,
                                           const WeightSource* source) const;
  // For weights of `from`, an engine that on_ranks was called of: an expert that they lack for this
  // plan, the number of experts if they do not serve at all, or -1.
  virtual int64_t first_missing(const Engine& from, const LayerWeights& held) const;
  // Shares or copies what they have, and reads the rest from the source, which may be null if
  // nothing is missing.
  virtual std::unique_ptr<LayerWeights> take_over(const Engine& from, const LayerWeights& held,
                                                  const WeightSource* source) const;

  // Whether weights can be refitted on this device, or why not.
  virtual Support refits() const { return Support::no("reload serves on this device"); }
  // For those that do, and for the next. What it returns lives no longer than the weights.
  virtual std::unique_ptr<EngineRefit> begin_refit(LayerWeights& weights,
                                                   const RefitRequest& request) const;
  // Keep it while work that reads the weights is enqueued on the stream, other than by a runner.
  virtual std::shared_ptr<const void> reading(const LayerWeights& /*weights*/,
                                              Stream /*stream*/) const {
    return nullptr;
  }
  virtual uint64_t content_hash(const LayerWeights& weights, std::span<const int32_t> places) const;
  // For ranks that give each other their weights (regroup.h); null where weights stay on their
  // device.
  virtual const PeerWeights* peer_weights() const { return nullptr; }

  // Whether adapters can be added on this device, or why not.
  virtual Support takes_adapters() const {
    return Support::no("adapters are added by layers on CPUs and on CUDA only");
  }
  // Whether forward can look at ids of adapters; otherwise unknown ones are counted where they are
  // looked up.
  virtual bool sees_adapter_ids() const { return true; }
  // Whether what is enqueued on the stream now becomes a graph, which is launched without a layer.
  virtual bool is_captured(Stream /*stream*/) const { return false; }
  // Whether adapters stay right when the weights of experts are exchanged, or why not.
  virtual Support keeps_adapters() const { return Support::yes(); }
  // Copies what this rank needs of a checked adapter; `experts` is the expert in each of its
  // places. Like the next, for those that take adapters.
  virtual std::unique_ptr<EngineAdapter> pack_adapter(const LoraAdapter& adapter,
                                                      const LayerWeights& weights,
                                                      std::span<const int32_t> experts) const;
  virtual std::shared_ptr<const EngineAdapterTable> adapter_table(
      std::span<const HeldAdapter> adapters) const;

  // Makes the device current for the calling thread and returns the one that was, for leave().
  virtual int32_t enter() const { return 0; }
  virtual void leave(int32_t /*previous*/) const noexcept {}
};

// The arguments of create and make_plan.
struct EngineRequest {
  const Context& context;
  const MoeSpec& spec;
  const LayerOptions& options;
  const ParallelSpec& parallel;
  const WeightSource* source = nullptr;  // for plans: make_plan may have one
};

// Routes one call of a TokenRouter.
using RouteFunction = std::function<void(const RouteArgs& args)>;

namespace experts {
struct KernelRow;
}

struct EngineRow {
  std::string_view name;
  DeviceKind device = DeviceKind::kCpu;
  double code_ambiguity = 0;  // as LayerResult::code_ambiguity of its results
  // Describes its devices if the first is usable: "cuda:0 NVIDIA H200, 139.8 GiB".
  std::string (*describe)();
  // Yes if this machine has the device, otherwise the reason.
  Support (*usable)(int32_t ordinal);
  // Plans, for weights that lie as `source` says. Throws as MoeLayer::create.
  std::unique_ptr<Engine> (*make)(const EngineRequest& request, const WeightSource& source);
  // Works as make_plan does.
  Plan (*plan)(const EngineRequest& request);
  // Works as tuning_candidates does; null if there is nothing to tune.
  std::vector<TuningEntry> (*candidates)(const EngineRequest& request, int64_t tokens);
  // Null for host memory.
  const DeviceRuntime* (*runtime)(int32_t ordinal);
  // For TokenRouter; null if the engine runs the routers of the catalog.
  Support (*routes)(const MoeSpec& spec);
  RouteFunction (*make_route)(int32_t ordinal, const MoeSpec& spec);
  // The kernels that this build has names and reasons of only; null if it may lack none.
  std::span<const experts::KernelRow> (*left_out)();
  // Plans for weights that other ranks have; null where they cannot give them.
  std::unique_ptr<Engine> (*make_unfilled)(const EngineRequest& request) = nullptr;
};

// The row of this name, or null.
const EngineRow* find_engine_row(std::string_view name) noexcept;
// The row of a device. Throws Error(kUnsupported) if this build has none.
const EngineRow& engine_row(const Device& device);
inline const EngineRow& engine_row(const Context& context) {
  return engine_row(parse_device(context.device()));
}
// The runtime of the context's device; null on "cpu".
const DeviceRuntime* device_runtime(const Context& context);

}  // namespace conclave::inline v0
