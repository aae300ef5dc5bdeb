#include "checkpoint/name_pattern.h"

#include <array>

namespace conclave::inline v0::checkpoint {
namespace {

using namespace weights;

// `count` ids, which is two for the fused parts.
struct PartIds {
  Part part;
  std::array<WeightId, 2> ids;
  size_t count;
};
constexpr PartIds one(Part part, WeightId id) { return {part, {id, id}, 1}; }
constexpr PartIds bias(Part part, WeightId matrix) {
  return one(part, matrix.with(WeightPlane::kBias));
}
constexpr PartIds two(Part part, WeightId gate, WeightId up) { return {part, {gate, up}, 2}; }
// Indexed by Part.
constexpr std::array kParts = {
    one(Part::kGate, kGate),
    one(Part::kUp, kUp),
    one(Part::kDown, kDown),
    two(Part::kGateUp, kGate, kUp),
    bias(Part::kGateBias, kGate),
    bias(Part::kUpBias, kUp),
    bias(Part::kDownBias, kDown),
    two(Part::kGateUpBias, kGate.with(WeightPlane::kBias), kUp.with(WeightPlane::kBias)),
    one(Part::kRouter, kRouter),
    one(Part::kRouterBias, kRouterBias),
    one(Part::kSelectionBias, kSelectionBias),
    one(Part::kExpertScale, kExpertScale),
    one(Part::kGlobalScale, kGlobalScale),
    one(Part::kRouterInputScale, kRouterInputScale),
    one(Part::kRouterTensor0, router_tensor(0)),
    one(Part::kRouterTensor1, router_tensor(1)),
    one(Part::kRouterTensor2, router_tensor(2)),
    one(Part::kRouterTensor3, router_tensor(3)),
    one(Part::kRouterTensor4, router_tensor(4)),
    one(Part::kRouterTensor5, router_tensor(5)),
    one(Part::kRouterTensor6, router_tensor(6)),
    one(Part::kRouterTensor7, router_tensor(7)),
    one(Part::kSharedGate, kSharedGate),
    one(Part::kSharedUp, kSharedUp),
    one(Part::kSharedDown, kSharedDown),
    two(Part::kSharedGateUp, kSharedGate, kSharedUp),
    bias(Part::kSharedGateBias, kSharedGate),
    bias(Part::kSharedUpBias, kSharedUp),
    bias(Part::kSharedDownBias, kSharedDown),
    one(Part::kSharedExpertGate, kSharedExpertGate),
    one(Part::kMixGate, kMixGate),
    one(Part::kMixGateBias, kMixGateBias),
    one(Part::kLatentDown, kLatentDown),
    one(Part::kLatentNorm, kLatentNorm),
    one(Part::kLatentUp, kLatentUp),
    one(Part::kOutputBias, kOutputBias),
    one(Part::kResidualGate, kResidualGate),
    one(Part::kResidualUp, kResidualUp),
    one(Part::kResidualDown, kResidualDown),
    PartIds{Part::kNotRead, {kGate, kGate}, 0},
};

consteval bool parts_follow_enum() {
  for (size_t i = 0; i < kParts.size(); ++i) {
    if (static_cast<size_t>(kParts[i].part) != i) return false;
  }
  return kParts.size() == static_cast<size_t>(Part::kNotRead) + 1;
}
static_assert(parts_follow_enum());

}  // namespace

bool is_expert_part(Part part) {
  const auto ids = ids_of(part);
  return !ids.empty() && ids.front().mlp() == WeightMlp::kRouted;
}

std::span<const WeightId> ids_of(Part part) {
  const PartIds& entry = kParts[static_cast<size_t>(part)];
  return std::span(entry.ids).first(entry.count);
}

}  // namespace conclave::inline v0::checkpoint
