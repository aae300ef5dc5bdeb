#include "layer/stages/cuda/cuda_stages.h"

#include "comm/one_launch.h"
#include "core/part_spec.h"
#include "core/shared_facts.h"
#include "layer/cuda/plan.h"

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

namespace conclave::inline v0 {
namespace {

using enum CudaBuffer;

static_assert(kCudaBuffers <= 64, "a BufferSet has a bit for each of 64 buffers");

constexpr std::array<std::string_view, kCudaBuffers> kNames = {"counters",
                                                               "bans of a call",
                                                               "live tokens",
                                                               "gate scratch",
                                                               "logits",
                                                               "topk_ids",
                                                               "topk_weights",
                                                               "given ids",
                                                               "physical ids",
                                                               "router ids",
                                                               "router weights",
                                                               "limited ids",
                                                               "limited weights",
                                                               "identity weights",
                                                               "shared factor",
                                                               "mix logits",
                                                               "mix",
                                                               "group",
                                                               "expert scratch",
                                                               "expert input",
                                                               "expert scales",
                                                               "expert rows",
                                                               "expert sums",
                                                               "shared input",
                                                               "shared scales",
                                                               "shared rows",
                                                               "shared sums",
                                                               "residual input",
                                                               "residual scales",
                                                               "residual rows",
                                                               "residual sums",
                                                               "rows of slots",
                                                               "shared own rows",
                                                               "latent rows",
                                                               "projected",
                                                               "one launch",
                                                               "rank's part",
                                                               "shared part",
                                                               "rank sums",
                                                               "shared sums of ranks",
                                                               "adapter marks",
                                                               "adapter ids",
                                                               "other ids",
                                                               "adapter group",
                                                               "adapter input",
                                                               "adapter scales",
                                                               "adapter rows",
                                                               "adapter terms",
                                                               "adapter down rows",
                                                               "adapter down terms",
                                                               "adapted output",
                                                               "gathered rows",
                                                               "gathered ids",
                                                               "gathered weights",
                                                               "gathered marks",
                                                               "experts' part",
                                                               "other parts",
                                                               "experts' sums"};

std::string experts_text(const CudaPlan& plan) {
  if (plan.fused.slots() == 0) return "experts";
  return fmt::format("experts, {} slots of shared ones", plan.fused.slots());
}

// A step of several ranks, and whether they exchange by windows.
std::string over_ranks(std::string_view step, int32_t ranks, Communicator* communicator) {
  const bool at_once = comm::find_one_launch(communicator) != nullptr;
  return fmt::format("{} {} ranks{}", step, ranks, at_once ? ", in one launch" : "");
}

// Declares what a chunk does for tokens, and what it leaves in which buffer.
class Declaration {
 public:
  explicit Declaration(const CudaPlan& plan)
      : plan_(plan),
        spec_(plan.spec),
        ids_(BufferSet(kTopkIds) | kTopkWeights | when(plan.part.has_replicas(), kPhysicalIds)),
        shared_(shared_facts(plan.spec)),
        factors_(when(shared_.factor != SharedFactor::kNone, kSharedFactor) |
                 when(shared_.has_mix_gate(), kMix)),
        made_(BufferSet(kRoutedOutput) | kRoutedSums),
        at_experts_(plan.gathers_rows() ? BufferSet(kGatheredIds) | kGatheredWeights |
                                              when(plan.takes_adapters(), kGatheredMarks)
                                        : ids_),
        routed_(plan.gathers_rows() ? BufferSet(kExpertSums) : made_),
        adapters_(when(plan.takes_adapters(), BufferSet(kAdapterMarks) | kAdapterIds |
                                                  kAdapterGroup | kAdapterInput | kAdapterScales |
                                                  kAdapterUp | kAdapterUpTerms | kAdapterDown |
                                                  kAdapterDownTerms)),
        parts_(when(plan.sums_ranks(),
                    BufferSet(kRankPart) | when(shared_.is_there, kRankSharedPart))) {}

  CudaStages all() {
    route();
    if (plan_.takes_adapters()) {
      add(CudaStage::kMarks, "marks of adapters", kLiveTokens, kAdapterMarks, false);
    }
    if (plan_.decode_tokens > 0) {
      stages_.set(
          CudaStage::kOneLaunch,
          {.name = fmt::format("up to {} tokens: {}", plan_.decode_tokens, plan_.decode_row->name),
           .reads = ids_ | factors_ | kLiveTokens,
           .writes = BufferSet(kCounters) | kOneLaunch | parts_,
           .most_tokens = plan_.decode_tokens});
    }
    run();
    finish();
    if (plan_.takes_adapters() && plan_.decode_tokens > 0) {
      add(CudaStage::kSelect, "rows with adapters",
          ids_ | kAdapterMarks | kAdapterOut | kLiveTokens,
          BufferSet(kAdapterIds) | kOtherIds | kAdapterGroup | parts_, false);
    }
    if (plan_.sums_ranks()) sum_ranks();
    return std::move(stages_);
  }

 private:
  void add(CudaStage number, std::string name, BufferSet reads, BufferSet writes,
           bool listed = true) {
    stages_.set(number,
                {.name = std::move(name), .reads = reads, .writes = writes, .listed = listed});
  }

  void route() {
    const bool gate = spec_.has_gate;
    add(CudaStage::kLive, "live tokens", {}, kLiveTokens, false);
    // A router that weighs shared experts makes their factors itself.
    if (shared_.factor != SharedFactor::kNone && !shared_.by_router()) {
      add(CudaStage::kFactors, "factors", kLiveTokens,
          factors_ | when(shared_.has_mix_gate(), kMixLogits), false);
    }
    add(CudaStage::kLogits, gate ? fmt::format("gate product [{}]", num_logits(spec_)) : "logits",
        {}, when(gate, BufferSet(kGate) | kLogits), gate);
    // A call with limits takes more of these than one without; which it is, no plan knows.
    const BufferSet limited = BufferSet(kCallBans) | kRouterIds | kRouterWeights | kLimitedIds |
                              kLimitedWeights | when(reads_logits(), kLogits);
    add(CudaStage::kRoute, plan_.gathers_rows() ? "route" : "route and group",
        when(gate, kLogits) | kLiveTokens | factors_,
        ids_ | kGroup | kGivenIds | limited | when(shared_.by_router(), kSharedFactor) |
            when(spec_.num_zero_experts > 0, kIdentity));
  }

  bool reads_logits() const { return plan_.router != nullptr && plan_.router_traits.reads_logits; }

  // A rank without experts leaves the routed rows as they are: no slot names them.
  void run() {
    const BufferSet input = BufferSet(kRoutedRows) | kRoutedScales;
    BufferSet rows;
    const bool has_experts = plan_.routed.problem.num_local_experts > 0;
    if (spec_.latent.size != 0 && (has_experts || plan_.gathers_rows())) {
      add(CudaStage::kLatentDown, fmt::format("latent down {}", spec_.latent.size), {}, kLatent);
      rows = kLatent;
    }
    if (plan_.gathers_rows()) {
      add(CudaStage::kGather,
          over_ranks("gather rows of", plan_.parallel.ep_size, plan_.part.expert_communicator),
          ids_ | rows | kLiveTokens | when(plan_.takes_adapters(), kAdapterMarks),
          BufferSet(kGatheredRows) | at_experts_ | kGroup);
      rows = kGatheredRows;
    }
    if (has_experts) {
      if (plan_.has_rows_of_slots()) {
        const bool own = plan_.routed.has_own_rows();
        add(CudaStage::kRowsOfSlots, own ? "rows of slots" : "weigh rows",
            at_experts_ | rows | when(own, kGroup), kWeighted, own);
        rows = kWeighted;
      }
      const bool quantises = plan_.routed.quantises();
      add(CudaStage::kInput, quantises ? "quantise" : "arrange rows", rows | kGroup | kLiveTokens,
          input | kRoutedOutput, quantises);
    }
    add(CudaStage::kExperts, experts_text(plan_), at_experts_ | input | rows | kGroup | kLiveTokens,
        made_ | kExperts | adapters_);
    if (plan_.gathers_rows()) {
      add(CudaStage::kExpertPart, "sum of slots", at_experts_ | made_, kExpertPart);
      add(CudaStage::kBringHome,
          over_ranks("bring home sums of", plan_.parallel.ep_size, plan_.part.expert_communicator),
          at_experts_ | made_ | kExpertPart, BufferSet(kOtherParts) | kExpertSums | parts_);
    }
    if (plan_.shared) {
      const experts::ExpertsProblem& shared = plan_.shared->problem;
      add_mlp(CudaStage::kShared,
              fmt::format("{} shared of {}", shared.num_local_experts, shared.intermediate_size),
              kSharedBuffers, when(plan_.shared->has_own_rows(), kSharedOwn) | adapters_);
    }
    if (plan_.residual) {
      add_mlp(CudaStage::kResidual,
              fmt::format("residual MLP {}", plan_.residual->problem.intermediate_size),
              kResidualBuffers);
    }
  }

  void add_mlp(CudaStage number, std::string name, const MlpBuffers& mlp, BufferSet own = {}) {
    add(number, std::move(name), kLiveTokens,
        BufferSet(kGroup) | kExperts | mlp.rows | mlp.scales | mlp.output | mlp.sums | own);
  }

  void finish() {
    const BufferSet terms = factors_ | kLiveTokens | when(plan_.shared.has_value(), kSharedOutput) |
                            when(plan_.residual.has_value(), kResidualOutput) |
                            when(spec_.num_zero_experts > 0, kIdentity);
    if (spec_.latent.size == 0) {
      return add(CudaStage::kFinish, "combine", ids_ | routed_ | terms, parts_);
    }
    const bool gathers = plan_.gathers_rows();
    const BufferSet sums = gathers ? routed_ : BufferSet(kLatent);
    if (!gathers) add(CudaStage::kSum, "combine", ids_ | routed_ | kLiveTokens, kLatent);
    if (spec_.latent.has_norm) add(CudaStage::kNorm, "rms norm", sums, sums);
    add(CudaStage::kFinish, fmt::format("latent up {}, finish", spec_.hidden_size), terms | sums,
        BufferSet(kProjected) | parts_);
  }

  void sum_ranks() {
    const BufferSet sums = BufferSet(kRankSum) | when(shared_.is_there, kRankSharedSum);
    add(CudaStage::kSumRanks,
        over_ranks("sum over", plan_.parallel.tp_size, plan_.part.tensor_communicator), parts_,
        sums);
    add(CudaStage::kRound, "round", sums | kLiveTokens, {});
  }

  const CudaPlan& plan_;
  const MoeSpec& spec_;
  const BufferSet ids_;  // with their weights
  const SharedFacts shared_;
  const BufferSet factors_;
  const BufferSet made_;        // by this rank's experts
  const BufferSet at_experts_;  // ids, weights and marks of the tokens that they have
  const BufferSet routed_;      // the routed part of this rank's tokens
  const BufferSet adapters_;    // what rows with adapters need
  const BufferSet parts_;       // what this rank has computed, where ranks add up
  CudaStages stages_;
};

}  // namespace

CudaStages declare_stages(const CudaPlan& plan) { return Declaration(plan).all(); }

std::vector<PlanBuffer> describe_buffers(const CudaStages& stages, const CudaSlices& slices) {
  return describe_buffers(stages.list, kNames, slices);
}

}  // namespace conclave::inline v0
