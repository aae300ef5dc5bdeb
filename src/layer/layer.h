// A layer, whatever its device: what a call checks and counts, in which order, and the weights that
// several layers share.
#pragma once

#include "layer/adapters/adapter_set.h"
#include "layer/engine.h"
#include "layer/migration/epoch_switch.h"
#include "layer/migration/migrating_layer.h"
#include "layer/own_workspace.h"
#include "layer/refit/forward_gate.h"
#include "layer/refit/layer_refit.h"
#include "layer/regroup/regrouping.h"

#include "conclave/layer.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace conclave::inline v0 {

// MoeLayer's methods forward to it and share its contract.
class Layer {
 public:
  Layer(const EngineRequest& request, const WeightSource& source);
  // Runs on the weights of `other`, for another number of tokens.
  Layer(const Layer& other, int64_t max_tokens);
  // The same on other ranks, which agree: MoeLayer::on_ranks.
  Layer(const Layer& other, const Context& context, const ParallelSpec& parallel,
        const WeightSource* source);
  // A layer that other ranks gave the weights of.
  Layer(const Context& context, LayerAfter after);
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;
  ~Layer();

  void forward(const ForwardArgs& args);
  void reload(const WeightSource& source, ReloadMode mode);
  // `refusal`: why this rank has no slots, which its peers learn of.
  void update_placement(const ExpertSlots& slots, const MigrationOptions& options,
                        std::exception_ptr refusal = nullptr);
  AdapterId add_adapter(const LoraAdapter& adapter);
  void remove_adapter(AdapterId id);
  AdapterSetPointer adapters() const { return shared_->adapters.current(); }
  // Sets of adapters that captured forwards read.
  size_t graph_bytes() const { return shared_->adapters.graph_bytes(); }
  size_t forget_graphs() const { return shared_->adapters.forget_graphs(); }
  // The slots of another split. Throws Error(kInvalidArgument) where it differs in more than these.
  ExpertSlots slots_of_split(const ParallelSpec& next) const;
  EpochPointer epoch() const { return shared_->epochs.current(); }
  // Whether experts may go to other places now, or why not: adapters do not move with them.
  Support moves_experts() const;
  // The parts of this layer that a migration in the background keeps alive.
  MigratingLayer lend() const;
  // Those need it that take this layer to other ranks; valid as long as this layer.
  LayerBefore lend_to_ranks() const;
  // The same of a refit.
  RefittedLayer lend_to_refit() const;
  RefitRanks refit_ranks() const noexcept;
  uint64_t content_hash() const;
  // Keeps refits out while it lives, and what is enqueued on the stream meanwhile apart from them.
  struct Replay {
    std::shared_ptr<const void> owners;
    std::unique_ptr<const ForwardGate::Pass> pass;
    std::shared_ptr<const void> reading;  // ends first
  };
  Replay begin_replay(Stream stream) const;
  LayerStatus status() const;
  // The spec as given; the plan's own says more of its scales where the source does.
  const MoeSpec& spec() const noexcept { return spec_; }
  const PlanBase& basis() const noexcept { return engine_->plan(); }
  const Plan& plan() const noexcept { return basis().summary; }
  size_t workspace_bytes(int64_t tokens) const { return runner_->workspace_bytes(tokens); }

 private:
  // State that all layers on one set of weights share.
  struct Shared {
    explicit Shared(EpochPointer first) : epochs(std::move(first)) {}
    std::unique_ptr<LayerWeights> weights;
    EpochSwitch epochs;
    AdapterStore adapters;
    std::mutex packing;  // held while an adapter is packed that must be so for these very weights
    std::atomic<int64_t> compared_adapters{0};  // the AdapterSet::key that ranks last compared
    ForwardGate gate;                           // forwards read the weights within it
    std::atomic<uint64_t> refit_epoch{0};
    // False from the first byte an in-place reload overwrites until it completes.
    std::atomic<bool> weights_complete{true};
    std::atomic<int64_t> forwards{0};
    std::atomic<int64_t> tokens{0};
    std::mutex mutex;
    std::vector<Layer*> users;  // bound to the weights, and bound anew when these move
  };

  std::unique_ptr<Engine> engine_on(const Context& context, const ParallelSpec& parallel,
                                    const WeightSource* source) const;
  void bind(const Layer* like);
  Support moves_in_background() const;
  void check_complete() const;
  // The expert in each place of this rank now, -1 for a free one.
  std::vector<int32_t> places() const;
  // Tells the weights which expert lies in which place now.
  void note_places() const;
  std::span<std::byte> workspace_of(const ForwardArgs& args, OwnWorkspace::Claim& own);
  void run(const LayerCall& call) const;
  // Whether the last call had these, so that ranks have compared them.
  bool has_compared(const AdapterSet& adapters) const;
  // The epoch that ranks agreed on for a call, after the device has it.
  EpochPointer take_up(const EpochOffer& offer, uint64_t agreed, Stream stream) const;
  void reload_staged(const WeightSource& source);

  const Context& context_;
  MoeSpec spec_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Shared> shared_;
  std::unique_ptr<LayerRunner> runner_;
  OwnWorkspace own_workspace_;
};

}  // namespace conclave::inline v0
