#include "names.h"

#include "conclave/error.h"

namespace conclave::python {
namespace {

// A word together with the spelling of its enumerator in the library's messages.
#define CONCLAVE_WORD(text, kind, enumerator) \
  { text, kind::enumerator, #kind "::" #enumerator }

constexpr Word<RouterScore> kRouterScores[] = {
    CONCLAVE_WORD("softmax", RouterScore, kSoftmax),
    CONCLAVE_WORD("sigmoid", RouterScore, kSigmoid),
    CONCLAVE_WORD("sqrtsoftplus", RouterScore, kSqrtSoftplus),
    CONCLAVE_WORD("none", RouterScore, kNone)};
constexpr Word<RouterOrder> kRouterOrders[] = {
    CONCLAVE_WORD("score_then_topk", RouterOrder, kScoreThenTopk),
    CONCLAVE_WORD("topk_then_score", RouterOrder, kTopkThenScore)};
constexpr Word<GroupScore> kGroupScores[] = {CONCLAVE_WORD("max", GroupScore, kMax),
                                             CONCLAVE_WORD("top2_sum", GroupScore, kTop2Sum)};
constexpr Word<GroupMask> kGroupMasks[] = {CONCLAVE_WORD("neg_inf", GroupMask, kNegInf),
                                           CONCLAVE_WORD("zero", GroupMask, kZero)};
constexpr Word<Renormalize> kRenormalizes[] = {
    CONCLAVE_WORD("none", Renormalize, kNone), CONCLAVE_WORD("sum", Renormalize, kSum),
    CONCLAVE_WORD("p_norm", Renormalize, kPNorm), CONCLAVE_WORD("softmax", Renormalize, kSoftmax)};
constexpr Word<EpsilonMode> kEpsilonModes[] = {CONCLAVE_WORD("add", EpsilonMode, kAdd),
                                               CONCLAVE_WORD("clamp_min", EpsilonMode, kClampMin)};
constexpr Word<SimulatedDistribution> kDistributions[] = {
    CONCLAVE_WORD("uniform", SimulatedDistribution, kUniform),
    CONCLAVE_WORD("normal", SimulatedDistribution, kNormal),
    CONCLAVE_WORD("zipf", SimulatedDistribution, kZipf),
    CONCLAVE_WORD("replay", SimulatedDistribution, kReplay)};
constexpr Word<SharedMode> kSharedModes[] = {
    CONCLAVE_WORD("none", SharedMode, kNone),
    CONCLAVE_WORD("add", SharedMode, kAdd),
    CONCLAVE_WORD("sigmoid_gate", SharedMode, kSigmoidGate),
    CONCLAVE_WORD("average", SharedMode, kAverage),
    CONCLAVE_WORD("softmax_mix", SharedMode, kSoftmaxMix),
    CONCLAVE_WORD("router_weight", SharedMode, kRouterWeight),
    CONCLAVE_WORD("fused_slots", SharedMode, kFusedSlots)};
constexpr Word<WeightScale> kWeightScales[] = {
    CONCLAVE_WORD("none", WeightScale, kNone), CONCLAVE_WORD("tensor", WeightScale, kTensor),
    CONCLAVE_WORD("channel", WeightScale, kChannel), CONCLAVE_WORD("block", WeightScale, kBlock)};
constexpr Word<WeightZero> kWeightZeros[] = {CONCLAVE_WORD("none", WeightZero, kNone),
                                             CONCLAVE_WORD("point", WeightZero, kPoint),
                                             CONCLAVE_WORD("offset", WeightZero, kOffset)};
constexpr Word<ActivationScale> kActivationScales[] = {
    CONCLAVE_WORD("none", ActivationScale, kNone),
    CONCLAVE_WORD("tensor_static", ActivationScale, kTensorStatic),
    CONCLAVE_WORD("token", ActivationScale, kToken),
    CONCLAVE_WORD("group", ActivationScale, kGroup)};
constexpr Word<ScaleValues> kScaleValues[] = {
    CONCLAVE_WORD("float", ScaleValues, kFloat), CONCLAVE_WORD("float16", ScaleValues, kF16),
    CONCLAVE_WORD("power_of_two", ScaleValues, kPowerOfTwo),
    CONCLAVE_WORD("steps", ScaleValues, kSteps), CONCLAVE_WORD("float8", ScaleValues, kFloat8)};
constexpr Word<RowScaleRule> kRowScaleRules[] = {
    CONCLAVE_WORD("quotient", RowScaleRule, kQuotient),
    CONCLAVE_WORD("floor_power", RowScaleRule, kFloorPower),
    CONCLAVE_WORD("even_power", RowScaleRule, kEvenPower),
    CONCLAVE_WORD("half_power", RowScaleRule, kHalfPower),
    CONCLAVE_WORD("ceil_power", RowScaleRule, kCeilPower),
    CONCLAVE_WORD("two_level", RowScaleRule, kTwoLevel)};
constexpr Word<WeightOn> kWeightOns[] = {CONCLAVE_WORD("output", WeightOn, kOutput),
                                         CONCLAVE_WORD("input", WeightOn, kInput)};
constexpr Word<PlacementStrategy> kPlacements[] = {
    CONCLAVE_WORD("linear", PlacementStrategy, kLinear),
    CONCLAVE_WORD("round_robin", PlacementStrategy, kRoundRobin),
    CONCLAVE_WORD("custom", PlacementStrategy, kCustom)};
constexpr Word<Reduce> kReduces[] = {CONCLAVE_WORD("full", Reduce, kFull),
                                     CONCLAVE_WORD("partial", Reduce, kPartial)};
constexpr Word<IdPolicy> kIdPolicies[] = {CONCLAVE_WORD("strict", IdPolicy, kStrict),
                                          CONCLAVE_WORD("skip", IdPolicy, kSkip)};
constexpr Word<EpTransport> kTransports[] = {
    CONCLAVE_WORD("variable", EpTransport, kVariable),
    CONCLAVE_WORD("fixed_slots", EpTransport, kFixedSlots)};
constexpr Word<EpCombine> kCombines[] = {
    CONCLAVE_WORD("unreduced", EpCombine, kUnreduced),
    CONCLAVE_WORD("reduced_per_rank", EpCombine, kReducedPerRank),
    CONCLAVE_WORD("rounded_per_rank", EpCombine, kRoundedPerRank)};
constexpr Word<ChunkOrder> kChunkOrders[] = {
    CONCLAVE_WORD("in_turn", ChunkOrder, kInTurn), CONCLAVE_WORD("by_twos", ChunkOrder, kByTwos),
    CONCLAVE_WORD("micro_batches", ChunkOrder, kMicroBatches)};
constexpr Word<Determinism> kDeterminisms[] = {
    CONCLAVE_WORD("repeatable", Determinism, kRepeatable),
    CONCLAVE_WORD("batch_invariant", Determinism, kBatchInvariant),
    CONCLAVE_WORD("unordered", Determinism, kUnordered)};
constexpr Word<GateUpOrder> kGateUpOrders[] = {
    CONCLAVE_WORD("concatenated", GateUpOrder, kConcatenated),
    CONCLAVE_WORD("interleaved", GateUpOrder, kInterleaved),
    CONCLAVE_WORD("single", GateUpOrder, kSingle)};
constexpr Word<ReloadMode> kReloadModes[] = {CONCLAVE_WORD("staged", ReloadMode, kStaged),
                                             CONCLAVE_WORD("in_place", ReloadMode, kInPlace)};
constexpr Word<RefitMode> kRefitModes[] = {CONCLAVE_WORD("staged", RefitMode, kStaged),
                                           CONCLAVE_WORD("staged_copy", RefitMode, kStagedCopy),
                                           CONCLAVE_WORD("in_place", RefitMode, kInPlace)};
constexpr Word<WhenFull> kWhenFull[] = {CONCLAVE_WORD("drop_oldest", WhenFull, kDropOldest),
                                        CONCLAVE_WORD("drop_newest", WhenFull, kDropNewest),
                                        CONCLAVE_WORD("error", WhenFull, kError)};
constexpr Word<ExpertSet> kExpertSets[] = {CONCLAVE_WORD("text", ExpertSet, kText),
                                           CONCLAVE_WORD("vision", ExpertSet, kVision)};
constexpr Word<ModelContainer> kContainers[] = {
    CONCLAVE_WORD("directory", ModelContainer, kSafetensors),
    CONCLAVE_WORD("gguf", ModelContainer, kGguf)};
constexpr Word<ScaleRule> kScaleRules[] = {CONCLAVE_WORD("amax", ScaleRule, kAmax),
                                           CONCLAVE_WORD("search", ScaleRule, kSearch)};
constexpr Word<WeightPlane> kPlanes[] = {
    CONCLAVE_WORD("codes", WeightPlane, kWeights),
    CONCLAVE_WORD("bias", WeightPlane, kBias),
    CONCLAVE_WORD("scale", WeightPlane, kScale),
    CONCLAVE_WORD("zero", WeightPlane, kZero),
    CONCLAVE_WORD("second_scale", WeightPlane, kSecondScale),
    CONCLAVE_WORD("global_scale", WeightPlane, kGlobalScale),
    CONCLAVE_WORD("input_scale", WeightPlane, kInputScale),
    CONCLAVE_WORD("column_order", WeightPlane, kColumnOrder),
    CONCLAVE_WORD("column_factor", WeightPlane, kColumnFactor)};
constexpr Word<MethodTensor::Use> kUses[] = {CONCLAVE_WORD("plane", MethodTensor::Use, kPlane),
                                             CONCLAVE_WORD("input", MethodTensor::Use, kInput),
                                             CONCLAVE_WORD("unused", MethodTensor::Use, kUnused)};

#undef CONCLAVE_WORD

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
std::span<const Word<WeightZero>> words(WeightZero) { return kWeightZeros; }
std::span<const Word<ActivationScale>> words(ActivationScale) { return kActivationScales; }
std::span<const Word<ScaleValues>> words(ScaleValues) { return kScaleValues; }
std::span<const Word<RowScaleRule>> words(RowScaleRule) { return kRowScaleRules; }
std::span<const Word<WeightOn>> words(WeightOn) { return kWeightOns; }
std::span<const Word<PlacementStrategy>> words(PlacementStrategy) { return kPlacements; }
std::span<const Word<Reduce>> words(Reduce) { return kReduces; }
std::span<const Word<IdPolicy>> words(IdPolicy) { return kIdPolicies; }
std::span<const Word<EpTransport>> words(EpTransport) { return kTransports; }
std::span<const Word<EpCombine>> words(EpCombine) { return kCombines; }
std::span<const Word<ChunkOrder>> words(ChunkOrder) { return kChunkOrders; }
std::span<const Word<Determinism>> words(Determinism) { return kDeterminisms; }
std::span<const Word<GateUpOrder>> words(GateUpOrder) { return kGateUpOrders; }
std::span<const Word<ReloadMode>> words(ReloadMode) { return kReloadModes; }
std::span<const Word<RefitMode>> words(RefitMode) { return kRefitModes; }
std::span<const Word<WhenFull>> words(WhenFull) { return kWhenFull; }
std::span<const Word<ExpertSet>> words(ExpertSet) { return kExpertSets; }
std::span<const Word<ModelContainer>> words(ModelContainer) { return kContainers; }
std::span<const Word<ScaleRule>> words(ScaleRule) { return kScaleRules; }
std::span<const Word<WeightPlane>> words(WeightPlane) { return kPlanes; }
std::span<const Word<MethodTensor::Use>> words(MethodTensor::Use) { return kUses; }

void throw_unknown_word(std::string_view field, std::string_view found, std::string_view known) {
  throw Error(ErrorCode::kUnknownName, {.what = "an option has an unknown value",
                                        .tensor = std::string(field),
                                        .expected = "one of " + std::string(known),
                                        .found = std::string(found)});
}

}  // namespace conclave::python
