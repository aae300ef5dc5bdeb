#include "plan/planner.h"

#include "plan/rank_loads.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>

namespace conclave::tool {
namespace {

// Rules of balancing compare slots with each other, which takes long with more experts.
constexpr int64_t kMostExperts = 4096;
// More fields of a heat map could not be told apart.
constexpr size_t kMostFields = 128;

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) /
         static_cast<double>(std::max<size_t>(values.size(), 1));
}

enum class Worst : uint8_t { kLeast, kLargest };

Spread spread_of(std::vector<double> values, Worst worst) {
  if (values.empty()) return {};
  const double mean = mean_of(values);
  std::ranges::sort(values);
  if (worst == Worst::kLeast) std::ranges::reverse(values);
  const auto at = [&](double share) {
    const double last = static_cast<double>(values.size() - 1);
    return values[static_cast<size_t>(std::llround(share * last))];
  };
  return {.mean = mean, .p50 = at(0.5), .p95 = at(0.95), .worst = values.back()};
}

// Rows of neighbouring ranks over the mean of all: of several in one field the largest.
std::vector<double> fields_of(const std::vector<double>& rank_rows) {
  const double mean = mean_of(rank_rows);
  const size_t fields = std::min(rank_rows.size(), kMostFields);
  std::vector<double> values(fields, 0);
  for (size_t rank = 0; rank < rank_rows.size(); ++rank) {
    double& field = values[rank * fields / rank_rows.size()];
    field = std::max(field, mean > 0 ? rank_rows[rank] / mean : 0);
  }
  return values;
}

// Batches of a trace may have any size: they are the fewest only where nothing else is asked for.
int64_t fewest_tokens(const PlanRequest& request) {
  int64_t fewest = std::ranges::max(request.tokens);
  for (const int64_t tokens : request.tokens) {
    if (tokens != kBatchesOfTrace) fewest = std::min(fewest, tokens);
  }
  return fewest;
}

// Collects what all batches of all layers say of one strategy and number of tokens.
struct Tally {
  std::vector<double> tokens;  // that a GPU brings
  std::vector<double> balance;
  std::vector<double> layer_us;
  std::vector<double> compute_us;
  std::vector<double> exchange_us;
  double dispatch_bytes = 0;
  double combine_bytes = 0;
  double network_bytes = 0;
  double workspace_bytes = 0;
};

class Planner {
 public:
  Planner(const PlannedModel& model, const RoutingTrace& trace, const PlanRequest& request)
      : model_(model),
        trace_(trace),
        request_(request),
        strategies_(candidate_strategies(request.cluster, model.spec())),
        tallies_(strategies_.size() * request.tokens.size()),
        rank_fields_(strategies_.size()) {
    check();
  }

  ClusterPlan run(const PlanProgress& progress) {
    const TraceInfo& info = trace_.info();
    std::vector<double> lifts;
    for (size_t position = 0; position < info.layers.size(); ++position) {
      const std::vector<int32_t> ids = trace_.ids(position);
      LayerLoad load(ids, info);
      lifts.push_back(hot_lift(load));
      expert_loads_.push_back(relative(load.all()));
      const ModelLayer& layer = model_.layer(info.layers[position]);
      for (size_t i = 0; i < strategies_.size(); ++i) add_layer(i, layer, load);
      if (progress) {
        progress(static_cast<int64_t>(position) + 1, static_cast<int64_t>(info.layers.size()));
      }
    }
    ClusterPlan plan{.request = request_, .trace_text = trace_.describe(), .trace = info};
    plan.hot_set = judge_hot_set(std::move(lifts), info);
    plan.expert_loads = std::move(expert_loads_);
    for (size_t tokens = 0; tokens < request_.tokens.size(); ++tokens) {
      for (size_t i = 0; i < strategies_.size(); ++i) plan.rows.push_back(row_of(i, tokens));
    }
    sort_rows(plan);
    choose(plan);
    choose_heat_maps(plan);
    return plan;
  }

 private:
  void check() const {
    const TraceInfo& info = trace_.info();
    if (info.num_experts > kMostExperts) {
      throw Error(ErrorCode::kUnsupported, {.what = "a plan is not made for so many experts",
                                            .tensor = "num_experts",
                                            .found = std::to_string(info.num_experts),
                                            .limit = fmt::format("at most {}", kMostExperts)});
    }
    const auto refuse = [](std::string what, const char* field, int64_t expected, int64_t found) {
      throw Error(ErrorCode::kInvalidArgument, {.what = std::move(what),
                                                .tensor = field,
                                                .expected = std::to_string(expected),
                                                .found = std::to_string(found)});
    };
    if (info.num_tokens == 0) refuse("the trace has no tokens", "num_tokens", 1, 0);
    for (const int64_t index : info.layers) {
      const MoeSpec& spec = model_.layer(index).spec;
      const std::string what =
          fmt::format("the trace is of another model than layer {} belongs to", index);
      if (spec.num_experts != info.num_experts) {
        refuse(what, "num_experts", spec.num_experts, info.num_experts);
      }
      if (spec.top_k != info.top_k) refuse(what, "top_k", spec.top_k, info.top_k);
    }
  }

  static std::vector<double> relative(std::vector<double> rows) {
    const double mean = mean_of(rows);
    for (double& each : rows) each = mean > 0 ? each / mean : 0;
    return rows;
  }

  Tally& tally(size_t strategy, size_t tokens) {
    return tallies_[strategy * request_.tokens.size() + tokens];
  }

  void add_layer(size_t index, const ModelLayer& layer, LayerLoad& load) {
    const Strategy& strategy = strategies_[index];
    const PlacedLayer placed = place_layer(strategy, request_.cluster, layer, load);
    if (strategy.ep > 1) add_fields(index, placed, load);
    for (size_t i = 0; i < request_.tokens.size(); ++i) {
      const int64_t of_group = request_.tokens[i] * strategy.group();
      for (const LoadBatch& batch : load.batches(of_group))
        add_batch(tally(index, i), placed, batch);
    }
  }

  void add_batch(Tally& sums, const PlacedLayer& placed, const LoadBatch& batch) const {
    const double tokens = batch.tokens / placed.strategy.group();
    const BatchTimes times = batch_times(placed, request_, batch);
    sums.tokens.push_back(tokens);
    sums.balance.push_back(times.balance);
    sums.compute_us.push_back(times.compute_us);
    sums.exchange_us.push_back(times.exchange_us);
    sums.layer_us.push_back(times.layer_us());
    sums.workspace_bytes =
        std::max(sums.workspace_bytes, workspace_of(placed, tokens, times.most_rows));
    const TravelBytes bytes = travel_bytes(placed, request_, tokens);
    sums.dispatch_bytes += bytes.dispatch.node_bytes + bytes.dispatch.network_bytes;
    sums.combine_bytes += bytes.combine.node_bytes + bytes.combine.network_bytes;
    sums.network_bytes += bytes.dispatch.network_bytes + bytes.combine.network_bytes;
  }

  // The second half of a trace as one batch, in which chance counts least.
  void add_fields(size_t index, const PlacedLayer& placed, const LayerLoad& load) {
    std::vector<double> rank_rows;
    const std::vector<double> rows = slot_rows(placed.slots, load.second(), /*whole=*/false);
    for (int32_t rank = 0; rank < placed.slots.num_ranks(); ++rank) {
      const auto begin = rows.begin() + placed.slots.first_of[static_cast<size_t>(rank)];
      const auto end = rows.begin() + placed.slots.first_of[static_cast<size_t>(rank) + 1];
      rank_rows.push_back(std::accumulate(begin, end, 0.0));
    }
    rank_fields_[index].push_back(fields_of(rank_rows));
  }

  double workspace_of(const PlacedLayer& placed, double tokens, double most_rows) const {
    const double own = tokens * placed.strategy.tp;
    const MoeSpec& spec = placed.layer.spec;
    const auto width = static_cast<double>(expert_width(spec));
    const double slots = static_cast<double>(spec.top_k);
    // Rows come once for each token and rank, of which each serves several slots.
    const double copies = placed.copies.choices_elsewhere > 0
                              ? placed.copies.to_ranks / placed.copies.choices_elsewhere
                              : 1 / slots;
    return tool::workspace_bytes(spec, placed.strategy.tp,
                                 {.own_tokens = own,
                                  .received_rows = placed.strategy.ep > 1 ? most_rows * copies : 0,
                                  .slot_rows = most_rows,
                                  .row_bytes = width * request_.dispatch_bits / 8});
  }

  StrategyPlan row_of(size_t index, size_t tokens) {
    const Strategy& strategy = strategies_[index];
    const Tally& sums = tally(index, tokens);
    StrategyPlan row{.strategy = strategy, .tokens = request_.tokens[tokens]};
    row.slots_per_rank = static_cast<int32_t>(
        (model_.spec().num_experts + strategy.redundant_experts + strategy.ep - 1) / strategy.ep);
    row.weight_bytes =
        rank_weight_bytes(model_, strategy.redundant_experts, strategy.ep, strategy.tp);
    row.workspace_bytes = sums.workspace_bytes;
    row.memory_bytes =
        row.weight_bytes + row.workspace_bytes + model_.other_bytes + request_.reserve_bytes;
    const double limit = request_.cluster.memory_gb * 1e9;
    if (row.memory_bytes > limit) {
      row.does_not_fit = fmt::format("a GPU needs {} ({} of experts' layers), and has {}",
                                     real_bytes_text(row.memory_bytes),
                                     real_bytes_text(row.weight_bytes), real_bytes_text(limit));
    }
    row.balance = spread_of(sums.balance, Worst::kLeast);
    row.compute_us = mean_of(sums.compute_us);
    row.exchange_us = mean_of(sums.exchange_us);
    row.layer_us = spread_of(sums.layer_us, Worst::kLargest);
    const auto batches = static_cast<double>(sums.tokens.size());
    row.dispatch_bytes = sums.dispatch_bytes / batches;
    row.combine_bytes = sums.combine_bytes / batches;
    row.network_bytes = sums.network_bytes / batches;
    row.tokens_per_second = mean_of(sums.tokens) / row.layer_us.mean * 1e6;
    return row;
  }

  // Those that fit come first.
  static void sort_rows(ClusterPlan& plan) {
    std::map<int64_t, size_t> order;
    for (size_t i = 0; i < plan.request.tokens.size(); ++i) {
      order.emplace(plan.request.tokens[i], i);
    }
    std::ranges::stable_sort(plan.rows, [&](const StrategyPlan& a, const StrategyPlan& b) {
      if (a.tokens != b.tokens) return order.at(a.tokens) < order.at(b.tokens);
      if (a.fits() != b.fits()) return a.fits();
      return a.layer_us.mean < b.layer_us.mean;
    });
  }

  static void choose(ClusterPlan& plan) {
    const int64_t fewest = fewest_tokens(plan.request);
    for (size_t i = 0; i < plan.rows.size(); ++i) {
      const StrategyPlan& row = plan.rows[i];
      if (!row.fits()) continue;
      const auto at = static_cast<int64_t>(i);
      const auto best = [&](int64_t chosen) -> const StrategyPlan& {
        return plan.rows[static_cast<size_t>(chosen)];
      };
      if (row.tokens == fewest &&
          (plan.best_latency < 0 || row.layer_us.mean < best(plan.best_latency).layer_us.mean)) {
        plan.best_latency = at;
      }
      if (plan.best_throughput < 0 ||
          row.tokens_per_second > best(plan.best_throughput).tokens_per_second) {
        plan.best_throughput = at;
      }
    }
  }

  // Compares balanced with linear ranks: as many as the best throughput takes, or else the fewest
  // that a linear placement has.
  void choose_heat_maps(ClusterPlan& plan) const {
    std::optional<int32_t> ep;
    if (plan.best_throughput >= 0) {
      const Strategy& best = plan.rows[static_cast<size_t>(plan.best_throughput)].strategy;
      if (best.ep > 1) ep = best.ep;
    }
    const auto is_linear = [&](const Strategy& strategy) {
      return strategy.placement == "linear" && (!ep || strategy.ep == *ep);
    };
    const auto linear = std::ranges::find_if(strategies_, is_linear);
    if (linear == strategies_.end()) return;
    plan.before = loads_of(static_cast<size_t>(linear - strategies_.begin()));
    for (const StrategyPlan& row : plan.rows) {
      if (!row.strategy.is_balanced() || row.strategy.ep != linear->ep || !row.fits()) continue;
      const std::string name = row.strategy.name();
      const auto same = std::ranges::find_if(
          strategies_, [&](const Strategy& strategy) { return strategy.name() == name; });
      plan.after = loads_of(static_cast<size_t>(same - strategies_.begin()));
      if (row.tokens == std::ranges::max(plan.request.tokens)) return;
    }
  }

  RankLoads loads_of(size_t index) const {
    return {.strategy = strategies_[index].name(),
            .of_layer = rank_fields_[index],
            .ranks = strategies_[index].ep};
  }

  const PlannedModel& model_;
  const RoutingTrace& trace_;
  const PlanRequest& request_;
  const std::vector<Strategy> strategies_;
  std::vector<Tally> tallies_;                                 // [strategies][tokens]
  std::vector<std::vector<std::vector<double>>> rank_fields_;  // [strategies][layers][fields]
  std::vector<std::vector<double>> expert_loads_;
};

}  // namespace

ClusterPlan plan_cluster(const PlannedModel& model, const RoutingTrace& trace,
                         const PlanRequest& request, const PlanProgress& progress) {
  return Planner(model, trace, request).run(progress);
}

}  // namespace conclave::tool
