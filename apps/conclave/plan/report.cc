#include "plan/report.h"

#include "input/shape_options.h"
#include "output/numbers.h"
#include "plan/advice.h"

#include "conclave/version.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace conclave::tool {
namespace {

constexpr int kSchemaVersion = 1;
constexpr const char* kTraceWord = "trace";  // in place of a number of tokens

using Json = nlohmann::ordered_json;

Json spread_json(const Spread& spread) {
  return {{"mean", spread.mean}, {"p50", spread.p50}, {"p95", spread.p95}, {"worst", spread.worst}};
}

Json tokens_json(int64_t tokens) {
  if (tokens == kBatchesOfTrace) return kTraceWord;
  return tokens;
}

Json row_json(const StrategyPlan& row) {
  return {{"strategy", row.strategy.name()},
          {"ep", row.strategy.ep},
          {"tp", row.strategy.tp},
          {"placement", row.strategy.placement},
          {"redundant_experts", row.strategy.redundant_experts},
          {"tokens", tokens_json(row.tokens)},
          {"slots_per_rank", row.slots_per_rank},
          {"fits", row.fits()},
          {"does_not_fit", row.does_not_fit},
          {"memory_bytes", row.memory_bytes},
          {"weight_bytes", row.weight_bytes},
          {"workspace_bytes", row.workspace_bytes},
          {"balance", spread_json(row.balance)},
          {"dispatch_bytes", row.dispatch_bytes},
          {"combine_bytes", row.combine_bytes},
          {"network_bytes", row.network_bytes},
          {"compute_us", row.compute_us},
          {"exchange_us", row.exchange_us},
          {"layer_us", spread_json(row.layer_us)},
          {"tokens_per_second", row.tokens_per_second}};
}

Json loads_json(const RankLoads& loads) {
  return {{"strategy", loads.strategy}, {"ranks", loads.ranks}, {"of_layer", loads.of_layer}};
}

const char* verdict_name(HotSetVerdict verdict) {
  switch (verdict) {
    case HotSetVerdict::kNone:
      return "none";
    case HotSetVerdict::kMild:
      return "mild";
    case HotSetVerdict::kHot:
      return "hot";
    case HotSetVerdict::kUnknown:
      break;
  }
  return "unknown";
}

// Which rows a table shows, as it numbers them.
std::vector<const StrategyPlan*> shown_rows(const ClusterPlan& plan, int64_t most) {
  std::map<int64_t, int64_t> shown;
  std::vector<const StrategyPlan*> rows;
  for (const StrategyPlan& row : plan.rows) {
    if (shown[row.tokens]++ < most) rows.push_back(&row);
  }
  return rows;
}

std::vector<Column> columns(const std::vector<const StrategyPlan*>& rows) {
  size_t name = 8;
  for (const StrategyPlan* row : rows) name = std::max(name, row->strategy.name().size());
  return {{"tokens", "T/GPU", 6},
          {"strategy", "strategy", static_cast<int>(name), Align::kLeft},
          {"slots_per_rank", "slots", 5},
          {"redundant_experts", "", 0},
          {"memory_bytes", "memory", 8},
          {"balance", "balance", 7},
          {"balance_p95", "p95", 5},
          {"sent_bytes", "sent", 8},
          {"network_bytes", "network", 8},
          {"compute_us", "compute", 8},
          {"exchange_us", "exchange", 8},
          {"layer_us", "us/layer", 8},
          {"layer_us_p95", "p95", 8},
          {"tokens_per_second", "T/s GPU", 7},
          {"fits", "fits", 4, Align::kLeft}};
}

Cell bytes_cell(double bytes) { return {bytes, real_bytes_text(bytes), Style::kPlain}; }

std::vector<Cell> cells(const StrategyPlan& row, bool is_best) {
  const Style style = is_best ? Style::kGood : Style::kPlain;
  const Cell tokens = row.tokens == kBatchesOfTrace ? Cell{kTraceWord, kTraceWord, Style::kPlain}
                                                    : integer_cell(row.tokens);
  return {tokens,
          text_cell(row.strategy.name(), style),
          integer_cell(row.slots_per_rank),
          integer_cell(row.strategy.redundant_experts),
          bytes_cell(row.memory_bytes),
          fixed_cell(row.balance.mean, 2),
          fixed_cell(row.balance.p95, 2),
          bytes_cell(row.dispatch_bytes + row.combine_bytes),
          bytes_cell(row.network_bytes),
          fixed_cell(row.compute_us, 1),
          fixed_cell(row.exchange_us, 1),
          fixed_cell(row.layer_us.mean, 1),
          fixed_cell(row.layer_us.p95, 1),
          {row.tokens_per_second, count_text(static_cast<uint64_t>(row.tokens_per_second)),
           Style::kPlain},
          {row.fits(), row.fits() ? "yes" : "no", row.fits() ? Style::kPlain : Style::kBad}};
}

Json facts_of(const PlannedModel& model, const ClusterPlan& plan) {
  return {{"schema", "conclave.cluster_plan"},
          {"version", kSchemaVersion},
          {"made_by", fmt::format("conclave {}", build_info().version)},
          {"model",
           {{"name", model.name},
            {"model_type", model.model_type},
            {"shape", shape_text(model.spec())},
            {"num_layers", model.layers.size()},
            {"other_bytes", model.other_bytes}}},
          {"cluster", cluster_json(plan.request.cluster)},
          {"trace",
           {{"source", plan.trace_text},
            {"num_tokens", plan.trace.num_tokens},
            {"num_experts", plan.trace.num_experts},
            {"top_k", plan.trace.top_k},
            {"layers", plan.trace.layers}}},
          {"dispatch_rows", dispatch_name(plan.request)},
          {"combine", combine_name(plan.request)},
          {"reserve_bytes", plan.request.reserve_bytes},
          {"hot_set",
           {{"verdict", verdict_name(plan.hot_set.verdict)},
            {"mean_lift", plan.hot_set.mean_lift},
            {"hot_layers", plan.hot_set.hot_layers},
            {"lifts", plan.hot_set.lifts}}},
          {"advice", advice(model, plan)},
          {"basis", basis(model, plan)}};
}

}  // namespace

const char* dispatch_name(const PlanRequest& request) {
  return request.dispatch_bits == 8 ? "e4m3" : "bf16";
}

const char* combine_name(const PlanRequest& request) {
  switch (request.combine) {
    case EpCombine::kUnreduced:
      return "unreduced";
    case EpCombine::kRoundedPerRank:
      return "rounded";
    case EpCombine::kReducedPerRank:
      break;
  }
  return "per-rank";
}

nlohmann::ordered_json plan_json(const PlannedModel& model, const ClusterPlan& plan) {
  Json json = facts_of(model, plan);
  const auto best = [&](int64_t index) -> Json {
    if (index < 0) return nullptr;
    const StrategyPlan& row = plan.rows[static_cast<size_t>(index)];
    return {{"strategy", row.strategy.name()}, {"tokens", tokens_json(row.tokens)}};
  };
  json["best_latency"] = best(plan.best_latency);
  json["best_throughput"] = best(plan.best_throughput);
  json["strategies"] = Json::array();
  for (const StrategyPlan& row : plan.rows) json["strategies"].push_back(row_json(row));
  json["expert_loads"] = plan.expert_loads;
  json["rank_loads"] = {{"before", loads_json(plan.before)}, {"after", loads_json(plan.after)}};
  return json;
}

void print_plan(const PlannedModel& model, const ClusterPlan& plan, OutputFormat format,
                int64_t most_rows, std::FILE* out) {
  const std::vector<const StrategyPlan*> rows = shown_rows(plan, most_rows);
  TableWriter table(out, format, columns(rows));
  double weights = 0;
  for (const ModelLayer& layer : model.layers) {
    weights += static_cast<double>(layer.spec.num_experts) * layer.bytes.expert +
               layer.bytes.shared + layer.bytes.whole;
  }
  const Cluster& cluster = plan.request.cluster;
  table.header(
      facts_of(model, plan),
      {fmt::format("model:   {}, {} MoE layer{}, {}, {}", model.name, model.layers.size(),
                   model.layers.size() == 1 ? "" : "s", shape_text(model.spec()),
                   real_bytes_text(weights)),
       fmt::format("cluster: {}, {:g} GB each; {:g} GB/s in a node{}", cluster_text(cluster),
                   cluster.memory_gb, cluster.link_gbps,
                   cluster.nodes == 1
                       ? ""
                       : fmt::format(", {:g} GB/s between nodes", cluster.network_gbps)),
       fmt::format("trace:   {}, {} layer{}; rows travel as {}, come home {}", plan.trace_text,
                   plan.trace.layers.size(), plan.trace.layers.size() == 1 ? "" : "s",
                   dispatch_name(plan.request), combine_name(plan.request))});
  const auto is_best = [&](const StrategyPlan* row) {
    const auto at = row - plan.rows.data();
    return at == plan.best_latency || at == plan.best_throughput;
  };
  for (const StrategyPlan* row : rows) table.row(cells(*row, is_best(row)));
  if (rows.size() < plan.rows.size()) {
    table.note(fmt::format("\n{} of {} rows; --top shows more", rows.size(), plan.rows.size()));
  }
  table.note("");
  for (const std::string& line : advice(model, plan)) table.note(line);
  table.note("");
  for (const std::string& line : basis(model, plan)) table.note("- " + line);
  table.finish("strategies");
}

}  // namespace conclave::tool
