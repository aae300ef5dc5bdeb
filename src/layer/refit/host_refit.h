// A refit of weights in host memory.
#pragma once

#include "layer/pack_mlp.h"
#include "layer/packed_weights.h"
#include "layer/plan.h"
#include "layer/refit/engine_refit.h"

#include "conclave/context.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace conclave::inline v0 {

class HostRefit final : public EngineRefit {
 public:
  // `live` are what forwards read; for all modes but kStaged nobody else may have their memory.
  // `spare` has slabs that an earlier refit has left, and gets what this one leaves. Throws Error:
  // kUnsupported for a part of experts that are read in place, kOutOfMemory.
  HostRefit(const Context& context, const LayerPlan& plan, PackedWeights& live,
            PackedWeights& spare, const RefitRequest& request);
  HostRefit(const HostRefit&) = delete;
  HostRefit& operator=(const HostRefit&) = delete;
  ~HostRefit() override;

  void stage(const StageCall& call) override;
  void publish() noexcept override;

 private:
  // The slabs of one matrix of one MLP.
  struct Kind {
    ExpertSlabs PackedWeights::*slabs = nullptr;
    WeightId id = weights::kGate;
    std::vector<int32_t> experts = {};  // by place, -1: the refit does not touch it
    std::vector<std::byte*> at = {};    // where a place is packed

    bool is_touched() const;
    // The experts of `units`, by place.
    std::vector<int32_t> experts_of(const RefitUnits& units) const;
  };
  // An MLP that the plan reads where its source has it.
  struct LentKind {
    WeightMlp mlp = WeightMlp::kRouted;
    LentExperts PackedWeights::*lent = nullptr;
    std::vector<int32_t> experts = {};
  };

  void add_kinds(WeightMlp mlp, ExpertSlabs PackedWeights::*gate_up,
                 ExpertSlabs PackedWeights::*down, const std::vector<int32_t>& places,
                 const RefitUnits& scope);
  void add_lent(WeightMlp mlp, LentExperts PackedWeights::*lent,
                const std::vector<int32_t>& experts, const RefitUnits& scope);
  void make_room(Kind& kind);
  bool take_spare(const Kind& kind);
  MlpWeights mlp_of(WeightMlp mlp) const;
  void lend(const StageCall& call);
  void stage_small(const StageCall& call);
  bool touches_any(const RefitUnits& units) const;
  // Experts by place, of matrices that are packed alike.
  using Step = std::function<void(const MlpWeights&, const std::vector<int32_t>&)>;
  void for_each_mlp(const StageCall& call, const Step& step) const;

  const Context& context_;
  const LayerPlan& plan_;
  PackedWeights& live_;
  PackedWeights& spare_;
  bool keeps_memory_;
  RefitMode mode_;
  RefitUnits scope_;
  // Weights are staged here, in the members that the scope touches; with kStagedCopy slabs that
  // change alone. After publish it has those that the layer had.
  PackedWeights next_;
  std::vector<Kind> kinds_;  // gate_up and down of an MLP follow each other
  std::vector<LentKind> lent_;
};

}  // namespace conclave::inline v0
