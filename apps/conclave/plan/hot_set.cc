#include "plan/hot_set.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace conclave::tool {
namespace {

std::string sentence(const HotSet& hot, const TraceInfo& trace) {
  const int64_t eighth = hot_experts(trace.num_experts);
  const std::string measured =
      fmt::format("the {} hottest of {} experts get {:.2f} times their part of the choices", eighth,
                  trace.num_experts, hot.mean_lift);
  switch (hot.verdict) {
    case HotSetVerdict::kNone:
      return fmt::format("this model has no hot set: {}, where even load is 1", measured);
    case HotSetVerdict::kMild:
      return fmt::format("this model has a mild hot set: {}", measured);
    case HotSetVerdict::kHot:
      return fmt::format("this model has a hot set: {}, in {} of {} layers {} times or more",
                         measured, hot.hot_layers, hot.lifts.size(), kHotLift);
    case HotSetVerdict::kUnknown:
      break;
  }
  return fmt::format(
      "the trace is too short to tell a hot set: {} tokens, and {} choices an "
      "expert in each half want {:.0f}",
      trace.num_tokens, kLeastChoices,
      2 * kLeastChoices * static_cast<double>(trace.num_experts) /
          static_cast<double>(trace.top_k));
}

}  // namespace

int64_t hot_experts(int64_t num_experts) { return std::max<int64_t>(num_experts / 8, 1); }

double hot_lift(const LayerLoad& load) {
  const std::vector<double>& first = load.first();
  const std::vector<double>& second = load.second();
  std::vector<size_t> order(first.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return first[a] > first[b]; });
  const auto eighth = static_cast<size_t>(hot_experts(static_cast<int64_t>(first.size())));
  const double sum = std::accumulate(second.begin(), second.end(), 0.0);
  if (sum == 0) return 1;
  double hot = 0;
  for (size_t i = 0; i < eighth; ++i) hot += second[order[i]];
  return hot / sum * static_cast<double>(first.size()) / static_cast<double>(eighth);
}

HotSet judge_hot_set(std::vector<double> lifts, const TraceInfo& trace) {
  HotSet hot;
  hot.lifts = std::move(lifts);
  if (!hot.lifts.empty()) {
    hot.mean_lift = std::accumulate(hot.lifts.begin(), hot.lifts.end(), 0.0) /
                    static_cast<double>(hot.lifts.size());
  }
  hot.hot_layers = std::ranges::count_if(hot.lifts, [](double lift) { return lift >= kHotLift; });
  const double choices = static_cast<double>(trace.num_tokens / 2) *
                         static_cast<double>(trace.top_k) / static_cast<double>(trace.num_experts);
  if (choices < kLeastChoices) {
    hot.verdict = HotSetVerdict::kUnknown;
  } else if (hot.mean_lift < kMildLift && hot.hot_layers == 0) {
    hot.verdict = HotSetVerdict::kNone;
  } else {
    hot.verdict = hot.mean_lift < kHotLift ? HotSetVerdict::kMild : HotSetVerdict::kHot;
  }
  hot.text = sentence(hot, trace);
  return hot;
}

}  // namespace conclave::tool
