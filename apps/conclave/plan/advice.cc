#include "plan/advice.h"

#include "output/numbers.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

namespace conclave::tool {
namespace {

// Differences below are less than the predictions' own errors.
constexpr double kWorthSaying = 0.05;

std::string time_text(const StrategyPlan& row) {
  return fmt::format("{:.0f} us a layer ({:.0f} compute, {:.0f} exchange)", row.layer_us.mean,
                     row.compute_us, row.exchange_us);
}

const StrategyPlan* row_at(const ClusterPlan& plan, int64_t index) {
  return index < 0 ? nullptr : &plan.rows[static_cast<size_t>(index)];
}

std::string nothing_fits(const ClusterPlan& plan) {
  const auto least = std::ranges::min_element(plan.rows, {}, &StrategyPlan::memory_bytes);
  return fmt::format("nothing fits: of all, {} with {} needs least, and {}", least->strategy.name(),
                     tokens_text(least->tokens), least->does_not_fit);
}

// The fastest row that fits and that `is_wanted`, for the most tokens.
template <class Wanted>
const StrategyPlan* fastest(const ClusterPlan& plan, const Wanted& is_wanted) {
  const int64_t most = std::ranges::max(plan.request.tokens);
  for (const StrategyPlan& row : plan.rows) {
    if (row.tokens == most && row.fits() && is_wanted(row.strategy)) return &row;
  }
  return nullptr;
}

std::optional<std::string> balancing(const ClusterPlan& plan) {
  const StrategyPlan* even =
      fastest(plan, [](const Strategy& s) { return s.ep > 1 && s.tp == 1 && !s.is_balanced(); });
  if (even == nullptr) return std::nullopt;
  // With many replicas a token's rows also meet on fewer ranks; that is another question.
  const StrategyPlan* balanced = fastest(plan, [&](const Strategy& s) {
    return s.is_balanced() && s.ep == even->strategy.ep && s.tp == 1 && s.redundant_experts <= s.ep;
  });
  if (balanced == nullptr) return std::nullopt;
  const double gain = even->layer_us.mean / balanced->layer_us.mean - 1;
  if (gain < kWorthSaying) {
    return fmt::format("balancing does not pay: with {}, {} takes {:.0f} us and {} {:.0f} us",
                       tokens_text(even->tokens), balanced->strategy.name(),
                       balanced->layer_us.mean, even->strategy.name(), even->layer_us.mean);
  }
  const double more = balanced->weight_bytes - even->weight_bytes;
  return fmt::format("balancing pays: with {}, {} takes {:.0f} us where {} takes {:.0f} us, for {}",
                     tokens_text(even->tokens), balanced->strategy.name(), balanced->layer_us.mean,
                     even->strategy.name(), even->layer_us.mean,
                     more > 0 ? real_bytes_text(more) + " more weights a GPU" : "no more weights");
}

}  // namespace

std::string tokens_text(int64_t tokens) {
  if (tokens == kBatchesOfTrace) return "the batches of the trace";
  return fmt::format("{} token{} a GPU", tokens, tokens == 1 ? "" : "s");
}

std::vector<std::string> advice(const PlannedModel& model, const ClusterPlan& plan) {
  std::vector<std::string> lines = {plan.hot_set.text};
  const StrategyPlan* latency = row_at(plan, plan.best_latency);
  const StrategyPlan* throughput = row_at(plan, plan.best_throughput);
  if (throughput == nullptr) {
    lines.push_back(nothing_fits(plan));
    return lines;
  }
  if (latency != nullptr) {
    lines.push_back(fmt::format("least latency: {}, {} with {}", latency->strategy.name(),
                                time_text(*latency), tokens_text(latency->tokens)));
  }
  lines.push_back(fmt::format(
      "most throughput: {}, {} with {}: {} tokens/s a GPU through {} layer{}",
      throughput->strategy.name(), time_text(*throughput), tokens_text(throughput->tokens),
      count_text(static_cast<uint64_t>(throughput->tokens_per_second /
                                       static_cast<double>(model.layers.size()))),
      model.layers.size(), model.layers.size() == 1 ? "" : "s"));
  if (const std::optional<std::string> line = balancing(plan)) lines.push_back(*line);
  return lines;
}

std::vector<std::string> basis(const PlannedModel& model, const ClusterPlan& plan) {
  const Cluster& cluster = plan.request.cluster;
  const ProductFacts& facts = product_facts(product_kind(model.spec()));
  std::vector<std::string> lines = {fmt::format(
      "every time is predicted; {} calls of layers over 2 H200, to which nothing was "
      "fitted, are {:.0f} % off in the mean and {:.0f} % at worst; layers over more GPUs "
      "have not been measured",
      kRankFacts.calls, 100 * kRankFacts.mean_error, 100 * kRankFacts.worst_error)};
  if (facts.measured) {
    lines.push_back(
        fmt::format("compute: fitted to whole layers on one H200 ({}), off by {:.0f} % of them in "
                    "the mean and {:.0f} % at worst",
                    facts.name, 100 * facts.mean_error, 100 * facts.worst_error));
  } else {
    lines.push_back(fmt::format("compute: the shares of the rates are assumed for {}", facts.name));
  }
  lines.push_back(
      fmt::format("exchange in a node: fitted to collectives over 2 and 4 H200, off by {:.0f} % at "
                  "worst; more GPUs are extrapolated",
                  100 * kWorstExchangeError));
  if (cluster.gpu != "h200") {
    lines.push_back(fmt::format("rates of {} are published or given; shares of them are an H200's",
                                cluster.gpu));
  }
  if (cluster.nodes > 1) {
    lines.push_back(
        fmt::format("network: {:g} GB/s a GPU and {:g} us are given or assumed, not "
                    "measured",
                    cluster.network_gbps, cluster.network_us));
  }
  lines.push_back(
      "left out: attention, the gate's product, overlap of exchange and compute, and other "
      "traffic");
  lines.push_back(
      "placements are made from the first half of the trace, and judged by the second; "
      "batches that are longer repeat it");
  return lines;
}

}  // namespace conclave::tool
