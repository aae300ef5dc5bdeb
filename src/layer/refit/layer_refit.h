// A refit as a transaction of a layer: what is staged, what ranks agree on, and when forwards see
// it.
#pragma once

#include "layer/engine.h"
#include "layer/migration/epoch_switch.h"
#include "layer/refit/engine_refit.h"
#include "layer/refit/forward_gate.h"

#include "conclave/broadcast_weights.h"
#include "conclave/comm.h"
#include "conclave/context.h"
#include "conclave/refit.h"

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

// A layer as a refit sees it: the parts that outlive the layer itself.
struct RefittedLayer {
  std::shared_ptr<const void> owners;  // keeps all that follows
  const Engine& engine;
  LayerWeights& weights;
  EpochSwitch& epochs;
  const AdapterStore& adapters;
  ForwardGate& gate;
  std::atomic<bool>& weights_complete;
  std::atomic<uint64_t>& refit_epoch;
  // The expert in each place now, to be asked once the epoch is claimed.
  std::function<std::vector<int32_t>()> places;
  const Context& context;
};

// The ranks that agree on a commit; null: none of that group.
struct RefitRanks {
  Communicator* givers = nullptr;   // those of a broadcast, which are asked first
  Communicator* tensor = nullptr;   // those that hold other slices
  Communicator* experts = nullptr;  // those that hold other experts
};

RefitRanks refit_ranks_of(const PlanBase& plan, Communicator* communicator) noexcept;
// Says no where the others commit, or send weights, for a rank without a transaction.
void withdraw_from_refit(const RefitRanks& ranks, std::string_view reason) noexcept;

class LayerRefit {
 public:
  // All of it as conclave/refit.h says.
  LayerRefit(RefittedLayer layer, const RefitOptions& options);
  LayerRefit(const LayerRefit&) = delete;
  LayerRefit& operator=(const LayerRefit&) = delete;
  ~LayerRefit() { rollback(); }

  void stage(const WeightSource& source, const RefitScope& part);
  void stage_broadcast(Communicator& communicator, const WeightSource* source,
                       BroadcastOptions options);
  static void refuse_broadcast(Communicator& communicator, std::string_view reason) noexcept;
  void commit();
  void rollback() noexcept;
  void withdraw(std::string_view reason) noexcept;
  bool is_staged() const { return staged_.covers(scope_); }

 private:
  void check_open() const;
  void join(Communicator& communicator);
  void check_keeps_own() const;
  void begin(bool keeps_memory);
  void begin_overwriting();
  std::exception_ptr failure() const;
  RefitRanks ranks() const;
  void hand_over(void (EngineRefit::*step)());

  RefittedLayer layer_;
  RefitMode mode_;
  uint64_t epoch_;
  Executor* executor_;
  Communicator* givers_;
  RefitScope named_;  // as the options say it
  RefitUnits scope_;
  RefitUnits staged_;
  std::exception_ptr stage_failure_;
  std::optional<EpochClaim> claim_;  // while the transaction is open
  std::unique_ptr<EngineRefit> engine_refit_;
};

}  // namespace conclave::inline v0
