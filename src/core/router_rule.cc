#include "core/router_rule.h"

#include <array>

namespace conclave::inline v0 {
namespace {

struct RuleName {
  std::string_view name;
  RouterRule rule;
};

constexpr std::array kRuleNames = {
    RuleName{"topk", RouterRule::kTopk},
    RuleName{"hash", RouterRule::kHash},
    RuleName{"sparse_mixer", RouterRule::kSparseMixer},
    RuleName{"sink_softmax", RouterRule::kSinkSoftmax},
    RuleName{"simulated", RouterRule::kSimulated},
};

}  // namespace

RouterRule router_rule(std::string_view name) noexcept {
  for (const RuleName& known : kRuleNames) {
    if (known.name == name) return known.rule;
  }
  return RouterRule::kCustom;
}

}  // namespace conclave::inline v0
