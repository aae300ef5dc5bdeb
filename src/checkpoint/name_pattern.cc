#include "checkpoint/name_pattern.h"

#include <array>

namespace conclave::inline v0::checkpoint {
namespace {

using enum WeightRole;

// Indexed by Part: `count` roles, which is two for the fused parts.
struct PartRoles {
  std::array<WeightRole, 2> roles;
  size_t count;
};
constexpr PartRoles one(WeightRole role) { return {{role, role}, 1}; }
constexpr std::array kPartRoles = {
    one(kGate),
    one(kUp),
    one(kDown),
    PartRoles{{kGate, kUp}, 2},
    one(kGateBias),
    one(kUpBias),
    one(kDownBias),
    PartRoles{{kGateBias, kUpBias}, 2},
    one(kRouter),
    one(kRouterBias),
    one(kSelectionBias),
    one(kExpertScale),
    one(kGlobalScale),
    one(kRouterInputScale),
    one(kHashTable),
    one(kSharedGate),
    one(kSharedUp),
    one(kSharedDown),
    PartRoles{{kSharedGate, kSharedUp}, 2},
    one(kSharedGateBias),
    one(kSharedUpBias),
    one(kSharedDownBias),
    one(kSharedExpertGate),
    one(kMixGate),
    one(kMixGateBias),
    one(kLatentDown),
    one(kLatentNorm),
    one(kLatentUp),
    one(kOutputBias),
    one(kResidualGate),
    one(kResidualUp),
    one(kResidualDown),
    PartRoles{{kGate, kGate}, 0},
};
static_assert(kPartRoles.size() == static_cast<size_t>(Part::kNotRead) + 1);

}  // namespace

std::span<const WeightRole> roles_of(Part part) {
  const PartRoles& entry = kPartRoles[static_cast<size_t>(part)];
  return std::span(entry.roles).first(entry.count);
}

}  // namespace conclave::inline v0::checkpoint
