// The words by which the JSON of a spec names enumerators: those of Python.
#pragma once

#include "conclave/spec.h"

#include <array>
#include <span>
#include <string_view>

namespace conclave::inline v0::capi {

template <class Enum>
struct Word {
  std::string_view text;
  Enum value;
  std::string_view spelling;  // in the C++ interface: "SharedMode::kAdd"
};

#define CONCLAVE_WORD(text, kind, enumerator) \
  Word<kind> { text, kind::enumerator, #kind "::" #enumerator }

template <class Enum>
inline constexpr std::array<Word<Enum>, 0> kWords = {};

template <>
inline constexpr std::array kWords<RouterScore> = {
    CONCLAVE_WORD("softmax", RouterScore, kSoftmax),
    CONCLAVE_WORD("sigmoid", RouterScore, kSigmoid),
    CONCLAVE_WORD("sqrtsoftplus", RouterScore, kSqrtSoftplus),
    CONCLAVE_WORD("none", RouterScore, kNone)};
template <>
inline constexpr std::array kWords<RouterOrder> = {
    CONCLAVE_WORD("score_then_topk", RouterOrder, kScoreThenTopk),
    CONCLAVE_WORD("topk_then_score", RouterOrder, kTopkThenScore)};
template <>
inline constexpr std::array kWords<GroupScore> = {CONCLAVE_WORD("max", GroupScore, kMax),
                                                  CONCLAVE_WORD("top2_sum", GroupScore, kTop2Sum)};
template <>
inline constexpr std::array kWords<GroupMask> = {CONCLAVE_WORD("neg_inf", GroupMask, kNegInf),
                                                 CONCLAVE_WORD("zero", GroupMask, kZero)};
template <>
inline constexpr std::array kWords<Renormalize> = {
    CONCLAVE_WORD("none", Renormalize, kNone), CONCLAVE_WORD("sum", Renormalize, kSum),
    CONCLAVE_WORD("p_norm", Renormalize, kPNorm), CONCLAVE_WORD("softmax", Renormalize, kSoftmax)};
template <>
inline constexpr std::array kWords<EpsilonMode> = {
    CONCLAVE_WORD("add", EpsilonMode, kAdd), CONCLAVE_WORD("clamp_min", EpsilonMode, kClampMin)};
template <>
inline constexpr std::array kWords<SimulatedDistribution> = {
    CONCLAVE_WORD("uniform", SimulatedDistribution, kUniform),
    CONCLAVE_WORD("normal", SimulatedDistribution, kNormal),
    CONCLAVE_WORD("zipf", SimulatedDistribution, kZipf),
    CONCLAVE_WORD("replay", SimulatedDistribution, kReplay)};
template <>
inline constexpr std::array kWords<SharedMode> = {
    CONCLAVE_WORD("none", SharedMode, kNone),
    CONCLAVE_WORD("add", SharedMode, kAdd),
    CONCLAVE_WORD("sigmoid_gate", SharedMode, kSigmoidGate),
    CONCLAVE_WORD("average", SharedMode, kAverage),
    CONCLAVE_WORD("softmax_mix", SharedMode, kSoftmaxMix),
    CONCLAVE_WORD("router_weight", SharedMode, kRouterWeight),
    CONCLAVE_WORD("fused_slots", SharedMode, kFusedSlots)};
template <>
inline constexpr std::array kWords<WeightScale> = {
    CONCLAVE_WORD("none", WeightScale, kNone), CONCLAVE_WORD("tensor", WeightScale, kTensor),
    CONCLAVE_WORD("channel", WeightScale, kChannel), CONCLAVE_WORD("block", WeightScale, kBlock)};
template <>
inline constexpr std::array kWords<WeightZero> = {CONCLAVE_WORD("none", WeightZero, kNone),
                                                  CONCLAVE_WORD("point", WeightZero, kPoint),
                                                  CONCLAVE_WORD("offset", WeightZero, kOffset)};
template <>
inline constexpr std::array kWords<ActivationScale> = {
    CONCLAVE_WORD("none", ActivationScale, kNone),
    CONCLAVE_WORD("tensor_static", ActivationScale, kTensorStatic),
    CONCLAVE_WORD("token", ActivationScale, kToken),
    CONCLAVE_WORD("group", ActivationScale, kGroup)};
template <>
inline constexpr std::array kWords<ScaleValues> = {
    CONCLAVE_WORD("float", ScaleValues, kFloat), CONCLAVE_WORD("float16", ScaleValues, kF16),
    CONCLAVE_WORD("power_of_two", ScaleValues, kPowerOfTwo),
    CONCLAVE_WORD("steps", ScaleValues, kSteps), CONCLAVE_WORD("float8", ScaleValues, kFloat8)};
template <>
inline constexpr std::array kWords<RowScaleRule> = {
    CONCLAVE_WORD("quotient", RowScaleRule, kQuotient),
    CONCLAVE_WORD("floor_power", RowScaleRule, kFloorPower),
    CONCLAVE_WORD("even_power", RowScaleRule, kEvenPower),
    CONCLAVE_WORD("half_power", RowScaleRule, kHalfPower),
    CONCLAVE_WORD("ceil_power", RowScaleRule, kCeilPower),
    CONCLAVE_WORD("two_level", RowScaleRule, kTwoLevel)};
template <>
inline constexpr std::array kWords<WeightOn> = {CONCLAVE_WORD("output", WeightOn, kOutput),
                                                CONCLAVE_WORD("input", WeightOn, kInput)};

#undef CONCLAVE_WORD

}  // namespace conclave::inline v0::capi
