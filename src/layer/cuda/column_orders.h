// Orders of columns for a GPU, whose kernels find the codes of a group side by side.
#pragma once

#include "experts/problem.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0 {

// Columns in an order in which those of a group are neighbours. A group fills whole units, the last
// one but for its end.
struct ColumnArrangement {
  std::vector<int32_t> columns;  // the stored column at each place; -1: none
  std::vector<int32_t> groups;   // the group of each unit
};
// order[c] is the group of column c, from 0 on. Groups of whole units come first, so that no place
// stays empty where all others but one are such.
ColumnArrangement arrange_columns(std::span<const int32_t> order, int64_t unit);

// Writes the codes of a row's `columns`, one behind the other; -1: 0. What is left of the last byte
// becomes 0.
void place_codes(const std::byte* row, std::span<const int32_t> columns, int64_t bits,
                 std::byte* out);

// The columns of one MLP's codes, with room for those of every expert.
struct MlpOrder {
  experts::OrderedColumns columns;
  int64_t inner = 0;  // columns of down, rows of gate and up
};
struct LayerOrders {
  MlpOrder routed;
  MlpOrder shared;
};

// Plans that have no weights to look at assume this: one order for gate and up, groups of as many
// columns as they would have of neighbours; of a slice of columns, the most that it can come to.
MlpOrder assumed_order(const experts::ExpertsProblem& problem);
// Lays the problem's codes out so.
void set_order(const MlpOrder& order, experts::ExpertsProblem& problem);

// For the plan: "groups of 128 columns, down's of 16; gate and up share an order".
std::string describe_order(const experts::ExpertsProblem& problem);

// Columns that the least group fills: wgmma multiplies as many at once.
inline constexpr int64_t kLeastGroup = 16;

}  // namespace conclave::inline v0
