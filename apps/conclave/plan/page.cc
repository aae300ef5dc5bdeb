#include "plan/page.h"

#include "input/shape_options.h"
#include "output/numbers.h"
#include "output/page_parts.h"
#include "plan/advice.h"
#include "plan/charts.h"
#include "plan/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

namespace conclave::tool {
namespace {

using page::key;
using page::section;
using page::tile;

constexpr size_t kCharted = 10;
constexpr size_t kListed = 40;

using Rows = std::vector<const StrategyPlan*>;

Rows rows_of(const ClusterPlan& plan, int64_t tokens, size_t most) {
  Rows rows;
  for (const StrategyPlan& row : plan.rows) {
    if (row.tokens == tokens && rows.size() < most) rows.push_back(&row);
  }
  return rows;
}

std::string best_tile(const ClusterPlan& plan, int64_t index, std::string_view meaning) {
  if (index < 0) return tile("nothing fits", meaning);
  const StrategyPlan& row = plan.rows[static_cast<size_t>(index)];
  return tile(row.strategy.name(), fmt::format("{}: {:.0f} us a layer with {}", meaning,
                                               row.layer_us.mean, tokens_text(row.tokens)));
}

const char* verdict_text(HotSetVerdict verdict) {
  switch (verdict) {
    case HotSetVerdict::kNone:
      return "no hot set";
    case HotSetVerdict::kMild:
      return "mild hot set";
    case HotSetVerdict::kHot:
      return "hot set";
    case HotSetVerdict::kUnknown:
      break;
  }
  return "hot set unknown";
}

std::string tiles(const ClusterPlan& plan) {
  return "<div class=\"tiles\">\n" + best_tile(plan, plan.best_throughput, "most throughput") +
         best_tile(plan, plan.best_latency, "least latency") +
         tile(verdict_text(plan.hot_set.verdict),
              fmt::format("hottest eighth of experts: {:.2f} times its part",
                          plan.hot_set.mean_lift)) +
         tile(cluster_text(plan.request.cluster),
              fmt::format("{:g} GB each", plan.request.cluster.memory_gb)) +
         "</div>\n";
}

std::string list(const std::vector<std::string>& lines) {
  std::string out = "<ul>\n";
  for (const std::string& line : lines) out += "<li>" + escaped(line) + ".</li>\n";
  return out + "</ul>\n";
}

std::string chart_sections(const ClusterPlan& plan) {
  std::string out;
  for (const int64_t tokens : plan.request.tokens) {
    const Rows rows = rows_of(plan, tokens, kCharted);
    out +=
        section(fmt::format("Time with {}", tokens_text(tokens)),
                "Predicted microseconds of a layer, the fastest strategies that fit first.",
                page::legend(key("main", "compute of the busiest rank") + key("warm", "exchange")) +
                    time_chart(rows));
    out += section(fmt::format("Balance with {}", tokens_text(tokens)),
                   "Mean rows of ranks over those of the busiest, 1 is perfect.",
                   page::legend(key("main", "mean of batches and layers") +
                                key("soft", "95 % are better") + key("warm", "worst")) +
                       balance_chart(rows));
  }
  return out;
}

std::string map_sections(const ClusterPlan& plan) {
  std::string out =
      section("Load of experts",
              "Rows of each expert over the mean of its layer: blue is less, orange is more. "
              "Numbers behind "
              "rows are the largest.",
              load_map(plan.expert_loads, plan.trace.layers, "expert", plan.trace.num_experts));
  const auto of_ranks = [&](const RankLoads& loads, std::string_view what) {
    if (loads.of_layer.empty()) return std::string();
    const bool is_cut = static_cast<size_t>(loads.ranks) > loads.of_layer.front().size();
    return section(
        fmt::format("Load of ranks {}: {}", what, loads.strategy),
        fmt::format("Rows of each rank over the mean of its layer, in the half of the "
                    "trace that no placement has seen.{}",
                    is_cut ? " Neighbouring ranks share a field, which has the largest." : ""),
        load_map(loads.of_layer, plan.trace.layers, "rank", loads.ranks));
  };
  return out + of_ranks(plan.before, "before balancing") + of_ranks(plan.after, "after balancing");
}

std::string table_section(const ClusterPlan& plan) {
  std::vector<std::vector<std::string>> cells;
  for (const int64_t tokens : plan.request.tokens) {
    for (const StrategyPlan* row : rows_of(plan, tokens, kListed)) {
      cells.push_back(
          {row->strategy.name(),
           row->tokens == kBatchesOfTrace ? "trace" : std::to_string(row->tokens),
           real_bytes_text(row->memory_bytes), fmt::format("{:.2f}", row->balance.mean),
           real_bytes_text(row->dispatch_bytes + row->combine_bytes),
           real_bytes_text(row->network_bytes), fmt::format("{:.0f}", row->compute_us),
           fmt::format("{:.0f}", row->exchange_us), fmt::format("{:.0f}", row->layer_us.mean),
           count_text(static_cast<uint64_t>(row->tokens_per_second)), row->fits() ? "yes" : "no"});
    }
  }
  return section("Strategies",
                 fmt::format("Up to {} for each number of tokens. Memory is that of a GPU over all "
                             "layers; bytes and times are those of one layer, bytes of a GPU.",
                             kListed),
                 page::table({"strategy", "T/GPU", "memory", "balance", "sent", "network",
                              "compute us", "exchange us", "us/layer", "T/s GPU", "fits"},
                             cells));
}

}  // namespace

std::string plan_page(const PlannedModel& model, const ClusterPlan& plan) {
  const std::string where = cluster_text(plan.request.cluster);
  std::string content =
      fmt::format("<h1>{}</h1>\n<p>{} MoE layer{}, {}, on {}; {}.</p>\n", escaped(model.name),
                  model.layers.size(), model.layers.size() == 1 ? "" : "s",
                  escaped(shape_text(model.spec())), escaped(where), escaped(plan.trace_text));
  content += tiles(plan);
  content += section("In words", "", list(advice(model, plan)));
  content += chart_sections(plan);
  content += map_sections(plan);
  content += table_section(plan);
  content += section("What the figures rest on", "", list(basis(model, plan)));
  content += fmt::format(
      "<footer>Rows travel as {} and come home {}. Everything on this page is also in what --json "
      "writes.</footer>\n",
      dispatch_name(plan.request), combine_name(plan.request));
  return page::document(fmt::format("{}: plan for {}", model.name, where), content);
}

}  // namespace conclave::tool
