#include "layer/cuda/column_orders.h"

#include "core/checked.h"
#include "core/code_bits.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>

namespace conclave::inline v0 {
namespace {

std::vector<std::vector<int32_t>> columns_by_group(std::span<const int32_t> order) {
  const int32_t last = order.empty() ? -1 : *std::ranges::max_element(order);
  std::vector<std::vector<int32_t>> groups(static_cast<size_t>(last + 1));
  for (size_t column = 0; column < order.size(); ++column) {
    groups[static_cast<size_t>(order[column])].push_back(static_cast<int32_t>(column));
  }
  return groups;
}

}  // namespace

ColumnArrangement arrange_columns(std::span<const int32_t> order, int64_t unit) {
  const std::vector<std::vector<int32_t>> groups = columns_by_group(order);
  ColumnArrangement made;
  const auto append = [&](bool whole) {
    for (size_t group = 0; group < groups.size(); ++group) {
      const auto count = static_cast<int64_t>(groups[group].size());
      if (count == 0 || (count % unit == 0) != whole) continue;
      const auto filled = static_cast<int64_t>(made.columns.size());
      made.columns.resize(static_cast<size_t>(round_up(filled, unit)), -1);
      made.columns.insert(made.columns.end(), groups[group].begin(), groups[group].end());
      made.groups.insert(made.groups.end(), static_cast<size_t>(ceil_div(count, unit)),
                         static_cast<int32_t>(group));
    }
  };
  append(true);
  append(false);
  return made;
}

void place_codes(const std::byte* row, std::span<const int32_t> columns, int64_t bits,
                 std::byte* out) {
  const auto code = [&](size_t place) {
    const int32_t column = columns[place];
    return column < 0 ? uint8_t{0} : code_at(row, column, bits);
  };
  if (bits == 8) {
    for (size_t i = 0; i < columns.size(); ++i) out[i] = std::byte{code(i)};
    return;
  }
  for (size_t i = 0; i < columns.size(); i += 2) {
    const int upper = i + 1 < columns.size() ? code(i + 1) << 4 : 0;
    out[i / 2] = static_cast<std::byte>(code(i) | upper);
  }
}

MlpOrder assumed_order(const experts::ExpertsProblem& problem) {
  const int64_t block = problem.quant.block_cols;
  const int64_t inner = problem.intermediate_size;
  MlpOrder order{
      .columns = {.gate_up_group = block, .down_group = block, .gate_up = problem.hidden_size},
      .inner = inner};
  const int64_t groups = ceil_div(std::max(problem.whole_intermediate_size, inner), block);
  if (inner == problem.whole_intermediate_size || groups <= 1) return order;
  order.columns.down_group = kLeastGroup;
  order.inner += (kLeastGroup - 1) * std::min(groups - 1, inner);
  return order;
}

std::string describe_order(const experts::ExpertsProblem& problem) {
  const experts::OrderedColumns& ordered = problem.ordered;
  return fmt::format(
      "groups of {} columns, down's of {}; {}", ordered.gate_up_group, ordered.down_group,
      ordered.up_begin == 0 ? "gate and up share an order"
                            : "gate and up have orders of their own, so that codes lie apart");
}

void set_order(const MlpOrder& order, experts::ExpertsProblem& problem) {
  problem.ordered = order.columns;
  problem.intermediate_size = order.inner;
  // Groups begin where they are put.
  problem.skipped_columns = 0;
}

}  // namespace conclave::inline v0
