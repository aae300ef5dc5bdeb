#include "layer/cuda/expert_places.h"

#include "core/checked.h"
#include "quant/code_meaning.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

// The groups of the columns that this rank holds; gate's are empty without a gate.
struct ExpertOrders {
  std::vector<int32_t> gate;
  std::vector<int32_t> up;
  std::vector<int32_t> down;

  bool has_two() const { return !gate.empty() && gate != up; }
};

ExpertOrders orders_of(const MlpSource& mlp, const LocalExpert& expert,
                       const WeightSource& source) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const auto read = [&](WeightMatrix matrix) {
    return load_column_order(problem.quant, source, expert.id(matrix), expert.expert,
                             expert.block_of(matrix, problem.hidden_size));
  };
  return {.gate = problem.activation.gated ? read(WeightMatrix::kGate) : std::vector<int32_t>(),
          .up = read(WeightMatrix::kUp),
          .down = read(WeightMatrix::kDown)};
}

int64_t width_of(std::span<const int32_t> order, int64_t unit) {
  return static_cast<int64_t>(arrange_columns(order, unit).columns.size());
}

// The most columns that some orders take, in groups of whole units.
class Widths {
 public:
  explicit Widths(int64_t block) : block_(block) {}

  void add(std::span<const int32_t> order) {
    if (order.empty()) return;
    const int64_t in_blocks = width_of(order, block_);
    is_even_ = is_even_ && in_blocks == static_cast<int64_t>(order.size());
    even_ = std::max(even_, in_blocks);
    uneven_ = std::max(uneven_, width_of(order, kLeastGroup));
  }
  int64_t group() const { return is_even_ ? block_ : kLeastGroup; }
  int64_t columns() const { return is_even_ ? even_ : uneven_; }

 private:
  int64_t block_;
  bool is_even_ = true;  // no place is empty
  int64_t even_ = 0;
  int64_t uneven_ = 0;
};

[[noreturn]] void refuse(const WeightSource& source, const LocalExpert& expert, WeightMatrix matrix,
                         std::string expected, std::string found) {
  throw Error(ErrorCode::kUnsupported,
              {.what = "the layer was created for weights with other orders of columns",
               .tensor = source.locate(expert.id(matrix, WeightPlane::kColumnOrder), expert.expert),
               .expected = std::move(expected),
               .found = std::move(found),
               .hint = "create another layer for these weights"});
}

// Puts the columns of an order at `begin` of `width` places.
MatrixPlaces place(const ColumnArrangement& made, int64_t group, int64_t begin, int64_t width) {
  MatrixPlaces places;
  places.columns.assign(static_cast<size_t>(width), -1);
  places.groups.assign(static_cast<size_t>(ceil_div(width, group)), -1);
  places.group = group;
  std::ranges::copy(made.columns, places.columns.begin() + begin);
  std::ranges::copy(made.groups, places.groups.begin() + begin / group);
  return places;
}

}  // namespace

MlpOrder read_order(const MlpSource& mlp, const WeightSource& source) {
  const experts::ExpertsProblem& problem = mlp.problem;
  if (mlp.experts.empty()) return {.columns = problem.ordered, .inner = problem.intermediate_size};
  Widths gate_up(problem.quant.block_cols);
  Widths down(problem.quant.block_cols);
  bool has_two = false;
  for (const LocalExpert& expert : mlp.experts) {
    const ExpertOrders orders = orders_of(mlp, expert, source);
    gate_up.add(orders.gate);
    gate_up.add(orders.up);
    down.add(orders.down);
    has_two |= orders.has_two();
  }
  experts::OrderedColumns columns{
      .gate_up_group = gate_up.group(), .down_group = down.group(), .gate_up = gate_up.columns()};
  if (has_two) {
    columns.up_begin = round_up(gate_up.columns(), gate_up.group());
    columns.gate_up += columns.up_begin;
  }
  return {.columns = columns, .inner = down.columns()};
}

ExpertPlaces places_of(const MlpSource& mlp, const LocalExpert& expert,
                       const WeightSource& source) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const experts::OrderedColumns& layout = problem.ordered;
  if (layout.gate_up == 0) return {};
  const ExpertOrders orders = orders_of(mlp, expert, source);
  if (orders.has_two() && layout.up_begin == 0) {
    refuse(source, expert, WeightMatrix::kUp, "the order of gate", "another one");
  }
  const auto arranged = [&](WeightMatrix matrix, const std::vector<int32_t>& order, int64_t group,
                            int64_t room) {
    ColumnArrangement made = arrange_columns(order, group);
    const auto width = static_cast<int64_t>(made.columns.size());
    if (width > room) {
      refuse(source, expert, matrix,
             fmt::format("groups of whole {} columns in {}, the last one but for its end", group,
                         room),
             fmt::format("{} columns", width));
    }
    return made;
  };
  const int64_t room = layout.gate_up - layout.up_begin;
  ExpertPlaces places;
  if (problem.activation.gated) {
    places.gate = place(arranged(WeightMatrix::kGate, orders.gate, layout.gate_up_group, room),
                        layout.gate_up_group, 0, layout.gate_up);
  }
  places.up = place(arranged(WeightMatrix::kUp, orders.up, layout.gate_up_group, room),
                    layout.gate_up_group, layout.up_begin, layout.gate_up);
  places.down = place(
      arranged(WeightMatrix::kDown, orders.down, layout.down_group, problem.intermediate_size),
      layout.down_group, 0, problem.intermediate_size);
  places.gate.rows = places.up.rows = places.down.columns;
  return places;
}

}  // namespace conclave::inline v0
