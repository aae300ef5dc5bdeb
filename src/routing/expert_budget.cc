#include "routing/expert_budget.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace conclave::inline v0::routing {
namespace {

constexpr int64_t kLowBits = 31;
constexpr int64_t kLowMask = (int64_t{1} << kLowBits) - 1;
constexpr double kUnits = 0x1p40;
constexpr double kLargest = 0x1p20;

// The weight in units. Its high part fits 29 bits and its low part 31, so that sums over 2^32 slots
// stay within 63.
int64_t in_units(float weight) {
  if (!std::isfinite(weight)) return 0;
  const double bounded = std::clamp(static_cast<double>(weight), -kLargest, kLargest);
  return static_cast<int64_t>(std::nearbyint(bounded * kUnits));
}

}  // namespace

ExpertWeightSums::ExpertWeightSums(int64_t num_experts)
    : num_experts_(num_experts), words_(static_cast<size_t>(3 * num_experts)) {}

void ExpertWeightSums::add(const Routing& routing) {
  for (int64_t index = 0; index < routing.num_tokens * routing.top_k; ++index) {
    const int64_t id = routing.topk_ids[index];
    if (id < 0 || id >= num_experts_) continue;
    const int64_t units = in_units(routing.topk_weights[index]);
    high(id) += units >> kLowBits;
    low(id) += units & kLowMask;
    ++slots(id);
  }
}

int64_t ExpertWeightSums::num_used() const {
  int64_t used = 0;
  for (int64_t expert = 0; expert < num_experts_; ++expert) {
    used += words_[static_cast<size_t>(3 * expert + 2)] > 0 ? 1 : 0;
  }
  return used;
}

std::vector<uint8_t> ExpertWeightSums::left_out(int64_t budget, int64_t num_zero_experts) const {
  struct Used {
    std::pair<int64_t, int64_t> sum;
    int64_t expert;
  };
  std::vector<Used> used;
  for (int64_t expert = 0; expert < num_experts_; ++expert) {
    const int64_t* const words = words_.data() + 3 * expert;
    if (words[2] == 0) continue;
    used.push_back({{words[0] + (words[1] >> kLowBits), words[1] & kLowMask}, expert});
  }
  std::ranges::stable_sort(used, [](const Used& a, const Used& b) { return a.sum > b.sum; });
  std::vector<uint8_t> flags(static_cast<size_t>(num_experts_), 1);
  const auto kept = std::min(budget, static_cast<int64_t>(used.size()));
  for (int64_t i = 0; i < kept; ++i) {
    flags[static_cast<size_t>(used[static_cast<size_t>(i)].expert)] = 0;
  }
  flags.resize(static_cast<size_t>(num_experts_ + num_zero_experts), 0);
  return flags;
}

}  // namespace conclave::inline v0::routing
