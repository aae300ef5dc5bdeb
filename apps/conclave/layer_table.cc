#include "layer_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace conclave::tool {
namespace {

std::vector<Column> columns(LayerTable::Speeds speeds) {
  const bool timed = speeds == LayerTable::Speeds::kShown;
  std::vector<Column> list = {{"layer", "layer", 5, Align::kRight},
                              {"tokens", "tokens", 6, Align::kRight},
                              {"experts_hit", "experts", 7, Align::kRight},
                              {"num_experts", "", 0, Align::kRight},
                              {"balance", "max/mean", 8, Align::kRight}};
  if (timed) {
    list.push_back({"ms", "ms", 8, Align::kRight});
    list.push_back({"gflops", "GFLOP/s", 8, Align::kRight});
    list.push_back({"gbps", "GB/s", 7, Align::kRight});
  }
  list.push_back({"tokens_checked", "checked", 7, Align::kRight});
  list.push_back({"worst_error", "worst error", 11, Align::kRight});
  list.push_back({"worst_token", "", 0, Align::kRight});
  list.push_back({"tolerance", "", 0, Align::kRight});
  list.push_back({"routing_mismatches", "routing", 9, Align::kRight});
  list.push_back({"order_mismatches", "", 0, Align::kRight});
  list.push_back({"logit_error", timed ? "" : "logits", 8, Align::kRight});
  list.push_back({"weight_error", timed ? "" : "weights", 8, Align::kRight});
  list.push_back({"ok", "check", 5, Align::kLeft});
  if (timed) {
    list.push_back({"packed_bytes", "", 0, Align::kRight});
    list.push_back({"in_place_bytes", "", 0, Align::kRight});
  }
  return list;
}

Cell routing_cell(const std::optional<int64_t>& mismatches) {
  if (!mismatches) return absent_cell();
  if (*mismatches == 0) return {0, "same"};
  return {*mismatches, fmt::format("{} differ", *mismatches), Style::kBad};
}

Cell optional_error_cell(const std::optional<double>& error) {
  return error ? error_cell(*error) : absent_cell();
}

template <class T>
void add_optional(std::optional<T>& sum, const std::optional<T>& value) {
  if (value) sum = sum.value_or(T{}) + *value;
}

void max_optional(std::optional<double>& sum, const std::optional<double>& value) {
  if (value) sum = std::max(sum.value_or(0), *value);
}

}  // namespace

void add_facts(const RankTeam& team, nlohmann::ordered_json& facts) {
  if (team.alone()) return;
  facts["ranks"] = team.size();
  facts["transport"] = team.transport();
  facts["ep_size"] = team.ep_size();
  facts["tp_size"] = team.tp_size();
}

LayerTable::LayerTable(std::FILE* out, OutputFormat format, Speeds speeds)
    : speeds_(speeds), writer_(out, format, columns(speeds)) {}

void LayerTable::add(const LayerRow& row) {
  writer_.row(cells(row));
  ++layers_;
  sum_.tokens += row.tokens;
  sum_.ms += row.ms;
  sum_.weights.packed_bytes += row.weights.packed_bytes;
  sum_.weights.in_place_bytes += row.weights.in_place_bytes;
  for (const std::string& reason : row.weights.packed_because) {
    packed_because_.push_back(fmt::format("layer {}: {}", row.layer, reason));
  }
  sum_.work.flops += row.work.flops;
  sum_.work.weight_bytes += row.work.weight_bytes;
  sum_.work.balance = std::max(sum_.work.balance, row.work.balance);
  sum_.check.tokens += row.check.tokens;
  sum_.check.worst_error = std::max(sum_.check.worst_error, row.check.worst_error);
  sum_.check.tolerance = std::max(sum_.check.tolerance, row.check.tolerance);
  add_optional(sum_.check.routing_mismatches, row.check.routing_mismatches);
  add_optional(sum_.check.order_mismatches, row.check.order_mismatches);
  max_optional(sum_.check.logit_error, row.check.logit_error);
  max_optional(sum_.check.weight_error, row.check.weight_error);
  if (row.check.ok) return;
  ++failures_;
  reasons_.push_back(fmt::format("layer {}: {}", row.layer, row.check.reason));
}

bool LayerTable::finish() {
  sum_.layer = -1;
  sum_.check.ok = failures_ == 0;
  writer_.total(cells(sum_));
  writer_.note("");
  for (const std::string& reason : reasons_) writer_.note(reason);
  for (const std::string& reason : packed_because_) writer_.note(reason);
  if (speeds_ == Speeds::kShown && sum_.weights.packed_bytes + sum_.weights.in_place_bytes > 0) {
    writer_.note("weights: " + memory_text(sum_.weights));
  }
  writer_.note(failures_ == 0
                   ? fmt::format("ok: {} of {} layers within tolerance", layers_, layers_)
                   : fmt::format("FAIL: {} of {} layers outside tolerance", failures_, layers_));
  writer_.finish("layers");
  return failures_ == 0;
}

std::vector<Cell> LayerTable::cells(const LayerRow& row) const {
  const bool is_total = row.layer < 0;
  const LayerWork& work = row.work;
  std::vector<Cell> cells = {is_total ? Cell{nullptr, "total"} : integer_cell(row.layer),
                             integer_cell(row.tokens)};
  if (is_total) {
    cells.push_back({nullptr, ""});
    cells.push_back({nullptr, ""});
  } else {
    cells.push_back(
        {work.experts_hit, fmt::format("{}/{}", work.experts_hit, row.spec.num_experts)});
    cells.push_back(integer_cell(row.spec.num_experts));
  }
  cells.push_back(work.balance > 0 ? fixed_cell(work.balance, 2) : absent_cell());
  if (speeds_ == Speeds::kShown) {
    const bool timed = row.ms > 0;
    cells.push_back(timed ? ms_cell(row.ms) : absent_cell());
    cells.push_back(timed ? fixed_cell(work.flops / row.ms * 1e-6, 2) : absent_cell());
    cells.push_back(timed ? fixed_cell(work.weight_bytes / row.ms * 1e-6, 2) : absent_cell());
  }
  const CheckResult& check = row.check;
  cells.push_back(integer_cell(check.tokens));
  cells.push_back(error_cell(check.worst_error));
  cells.push_back(check.worst_token < 0 ? absent_cell() : integer_cell(check.worst_token));
  cells.push_back(error_cell(check.tolerance));
  cells.push_back(routing_cell(check.routing_mismatches));
  cells.push_back(check.order_mismatches ? integer_cell(*check.order_mismatches) : absent_cell());
  cells.push_back(optional_error_cell(check.logit_error));
  cells.push_back(optional_error_cell(check.weight_error));
  cells.push_back({check.ok, check.ok ? "ok" : "FAIL", check.ok ? Style::kGood : Style::kBad});
  if (speeds_ == Speeds::kShown) {
    cells.push_back(integer_cell(static_cast<int64_t>(row.weights.packed_bytes)));
    cells.push_back(integer_cell(static_cast<int64_t>(row.weights.in_place_bytes)));
  }
  return cells;
}

}  // namespace conclave::tool
