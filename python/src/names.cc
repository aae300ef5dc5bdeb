#include "names.h"

#include "conclave/error.h"

namespace conclave::python {
namespace {

constexpr Word<RouterScore> kRouterScores[] = {{"softmax", RouterScore::kSoftmax},
                                               {"sigmoid", RouterScore::kSigmoid},
                                               {"sqrtsoftplus", RouterScore::kSqrtSoftplus},
                                               {"none", RouterScore::kNone}};
constexpr Word<RouterOrder> kRouterOrders[] = {{"score_then_topk", RouterOrder::kScoreThenTopk},
                                               {"topk_then_score", RouterOrder::kTopkThenScore}};
constexpr Word<GroupScore> kGroupScores[] = {{"max", GroupScore::kMax},
                                             {"top2_sum", GroupScore::kTop2Sum}};
constexpr Word<GroupMask> kGroupMasks[] = {{"neg_inf", GroupMask::kNegInf},
                                           {"zero", GroupMask::kZero}};
constexpr Word<Renormalize> kRenormalizes[] = {{"none", Renormalize::kNone},
                                               {"sum", Renormalize::kSum},
                                               {"p_norm", Renormalize::kPNorm},
                                               {"softmax", Renormalize::kSoftmax}};
constexpr Word<EpsilonMode> kEpsilonModes[] = {{"add", EpsilonMode::kAdd},
                                               {"clamp_min", EpsilonMode::kClampMin}};
constexpr Word<SimulatedDistribution> kDistributions[] = {
    {"uniform", SimulatedDistribution::kUniform},
    {"normal", SimulatedDistribution::kNormal},
    {"zipf", SimulatedDistribution::kZipf},
    {"replay", SimulatedDistribution::kReplay}};
constexpr Word<SharedMode> kSharedModes[] = {{"none", SharedMode::kNone},
                                             {"add", SharedMode::kAdd},
                                             {"sigmoid_gate", SharedMode::kSigmoidGate},
                                             {"average", SharedMode::kAverage},
                                             {"softmax_mix", SharedMode::kSoftmaxMix},
                                             {"router_weight", SharedMode::kRouterWeight},
                                             {"fused_slots", SharedMode::kFusedSlots}};
constexpr Word<WeightScale> kWeightScales[] = {{"none", WeightScale::kNone},
                                               {"tensor", WeightScale::kTensor},
                                               {"channel", WeightScale::kChannel},
                                               {"block", WeightScale::kBlock}};
constexpr Word<ActivationScale> kActivationScales[] = {
    {"none", ActivationScale::kNone},
    {"tensor_static", ActivationScale::kTensorStatic},
    {"token", ActivationScale::kToken},
    {"group", ActivationScale::kGroup}};
constexpr Word<WeightOn> kWeightOns[] = {{"output", WeightOn::kOutput},
                                         {"input", WeightOn::kInput}};
constexpr Word<PlacementStrategy> kPlacements[] = {{"linear", PlacementStrategy::kLinear},
                                                   {"round_robin", PlacementStrategy::kRoundRobin},
                                                   {"custom", PlacementStrategy::kCustom}};
constexpr Word<Reduce> kReduces[] = {{"full", Reduce::kFull}, {"partial", Reduce::kPartial}};
constexpr Word<IdPolicy> kIdPolicies[] = {{"strict", IdPolicy::kStrict}, {"skip", IdPolicy::kSkip}};
constexpr Word<EpTransport> kTransports[] = {{"variable", EpTransport::kVariable},
                                             {"fixed_slots", EpTransport::kFixedSlots}};
constexpr Word<EpCombine> kCombines[] = {{"unreduced", EpCombine::kUnreduced},
                                         {"reduced_per_rank", EpCombine::kReducedPerRank}};
constexpr Word<Determinism> kDeterminisms[] = {{"repeatable", Determinism::kRepeatable},
                                               {"batch_invariant", Determinism::kBatchInvariant},
                                               {"unordered", Determinism::kUnordered}};
constexpr Word<GateUpOrder> kGateUpOrders[] = {{"concatenated", GateUpOrder::kConcatenated},
                                               {"interleaved", GateUpOrder::kInterleaved},
                                               {"single", GateUpOrder::kSingle}};
constexpr Word<ReloadMode> kReloadModes[] = {{"staged", ReloadMode::kStaged},
                                             {"in_place", ReloadMode::kInPlace}};

}  // namespace

std::span<const Word<RouterScore>> words(RouterScore) { return kRouterScores; }
std::span<const Word<RouterOrder>> words(RouterOrder) { return kRouterOrders; }
std::span<const Word<GroupScore>> words(GroupScore) { return kGroupScores; }
std::span<const Word<GroupMask>> words(GroupMask) { return kGroupMasks; }
std::span<const Word<Renormalize>> words(Renormalize) { return kRenormalizes; }
std::span<const Word<EpsilonMode>> words(EpsilonMode) { return kEpsilonModes; }
std::span<const Word<SimulatedDistribution>> words(SimulatedDistribution) { return kDistributions; }
std::span<const Word<SharedMode>> words(SharedMode) { return kSharedModes; }
std::span<const Word<WeightScale>> words(WeightScale) { return kWeightScales; }
std::span<const Word<ActivationScale>> words(ActivationScale) { return kActivationScales; }
std::span<const Word<WeightOn>> words(WeightOn) { return kWeightOns; }
std::span<const Word<PlacementStrategy>> words(PlacementStrategy) { return kPlacements; }
std::span<const Word<Reduce>> words(Reduce) { return kReduces; }
std::span<const Word<IdPolicy>> words(IdPolicy) { return kIdPolicies; }
std::span<const Word<EpTransport>> words(EpTransport) { return kTransports; }
std::span<const Word<EpCombine>> words(EpCombine) { return kCombines; }
std::span<const Word<Determinism>> words(Determinism) { return kDeterminisms; }
std::span<const Word<GateUpOrder>> words(GateUpOrder) { return kGateUpOrders; }
std::span<const Word<ReloadMode>> words(ReloadMode) { return kReloadModes; }

void throw_unknown_word(std::string_view field, std::string_view found, std::string_view known) {
  throw Error(ErrorCode::kUnknownName, {.what = "an option has an unknown value",
                                        .tensor = std::string(field),
                                        .expected = "one of " + std::string(known),
                                        .found = std::string(found)});
}

}  // namespace conclave::python
