// The routing methods of vLLM as values of RouterSpec.
#include "core/catalog.h"

#include "conclave/routing.h"

#include <array>

namespace conclave::inline v0 {
namespace {

// The published DeepSeek code and its successors add this to the sum of the chosen scores.
constexpr double kPublishedEpsilon = 1e-20;

struct MethodRow {
  std::string_view name;
  RouterSpec (*make)();
};

RouterSpec softmax(Renormalize renormalize) {
  return {.score = RouterScore::kSoftmax, .renormalize = renormalize};
}

RouterSpec sigmoid(Renormalize renormalize) {
  return {.score = RouterScore::kSigmoid, .renormalize = renormalize};
}

// A selection bias, and division by the sum of the unbiased scores.
RouterSpec biased(RouterScore score) {
  return {.score = score, .has_selection_bias = true, .epsilon = kPublishedEpsilon};
}

RouterSpec chosen_first(RouterScore score) {
  return {.score = score, .order = RouterOrder::kTopkThenScore, .renormalize = Renormalize::kNone};
}

constexpr std::array kMethods = {
    MethodRow{"Default", [] { return softmax(Renormalize::kNone); }},
    MethodRow{"Renormalize", [] { return chosen_first(RouterScore::kSoftmax); }},
    MethodRow{"DeepSeekV3", [] { return biased(RouterScore::kSigmoid); }},
    MethodRow{"Llama4", [] { return chosen_first(RouterScore::kSigmoid); }},
    MethodRow{"RenormalizeNaive", [] { return softmax(Renormalize::kSum); }},
    MethodRow{"TopK", [] { return chosen_first(RouterScore::kNone); }},
    MethodRow{"SigmoidRenorm", [] { return sigmoid(Renormalize::kSum); }},
    MethodRow{"MiniMax2", [] { return biased(RouterScore::kSigmoid); }},
    MethodRow{"Sigmoid", [] { return sigmoid(Renormalize::kNone); }},
    MethodRow{"DeepseekV4", [] { return biased(RouterScore::kSqrtSoftplus); }},
    MethodRow{"Simulated", [] { return RouterSpec{.name = "simulated"}; }},
};

}  // namespace

RouterSpec routing_method(std::string_view name) {
  return Catalog<MethodRow>(kMethods).find(name, "routing method").make();
}

}  // namespace conclave::inline v0
