#include "record/rows.h"

#include "conclave/error.h"
#include "conclave/routing_record.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0 {
namespace {

struct Row {
  std::span<const int32_t> ids;
  std::span<const float> weights;

  static Row of(const RecordedRows& rows, int64_t row) {
    const auto slots = static_cast<size_t>(rows.layer.num_slots);
    const size_t first = static_cast<size_t>(row) * slots;
    return {.ids = std::span(rows.topk_ids).subspan(first, slots),
            .weights = std::span(rows.topk_weights).subspan(first, slots)};
  }
  // Weights of an expert that occurs more than once add up, as they do in a forward.
  std::map<int32_t, double> by_expert() const {
    std::map<int32_t, double> sums;
    for (size_t slot = 0; slot < ids.size(); ++slot) {
      if (ids[slot] >= 0) sums[ids[slot]] += static_cast<double>(weights[slot]);
    }
    return sums;
  }
  std::vector<int32_t> sorted_ids() const {
    std::vector<int32_t> sorted(ids.begin(), ids.end());
    std::ranges::sort(sorted);
    return sorted;
  }
};

// NaN on one side is as far as can be; on both sides there is no difference.
double distance(double a, double b) {
  if (std::isnan(a) && std::isnan(b)) return 0;
  return a == b ? 0 : std::abs(a - b);
}

double weight_difference(const Row& first, const Row& second) {
  std::map<int32_t, double> left = first.by_expert();
  double worst = 0;
  const auto take = [&worst](double difference) {
    if (!std::isnan(worst) && !(difference <= worst)) worst = difference;
  };
  for (const auto& [expert, weight] : second.by_expert()) {
    const auto found = left.find(expert);
    take(distance(found != left.end() ? found->second : 0.0, weight));
    if (found != left.end()) left.erase(found);
  }
  for (const auto& [expert, weight] : left) take(distance(weight, 0.0));
  return worst;
}

void compare_token(const TokenKey& token, const Row& first, const Row& second,
                   int64_t most_examples, LayerDifferences& layer,
                   std::vector<RoutingDifference>& examples) {
  ++layer.compared;
  const bool same_slots = std::ranges::equal(first.ids, second.ids);
  const bool same_weights =
      std::memcmp(first.weights.data(), second.weights.data(), first.weights.size_bytes()) == 0;
  if (same_slots && same_weights) return;
  if (same_slots) {
    ++layer.other_weights;
  } else {
    ++(first.sorted_ids() == second.sorted_ids() ? layer.reordered : layer.other_experts);
  }
  const double difference = weight_difference(first, second);
  if (!std::isnan(layer.worst_weight_difference) &&
      !(difference <= layer.worst_weight_difference)) {
    layer.worst_weight_difference = difference;
    layer.worst_token = token;
  }
  if (std::ssize(examples) >= most_examples) return;
  examples.push_back({.layer = layer.layer,
                      .token = token,
                      .first_ids = {first.ids.begin(), first.ids.end()},
                      .second_ids = {second.ids.begin(), second.ids.end()},
                      .weight_difference = difference});
}

LayerDifferences compare_layer(const RecordedRows& first, const RecordedRows& second,
                               int64_t most_examples, std::vector<RoutingDifference>& examples) {
  if (first.layer.num_slots != second.layer.num_slots) {
    throw Error(ErrorCode::kShape, {.what = "layer " + std::to_string(first.layer.layer) +
                                            " has another number of slots in the second record",
                                    .tensor = "num_slots",
                                    .expected = std::to_string(first.layer.num_slots),
                                    .found = std::to_string(second.layer.num_slots)});
  }
  const bool knows_specs = first.layer.spec_hash != 0 && second.layer.spec_hash != 0;
  LayerDifferences layer{
      .layer = first.layer.layer,
      .worst_token = {},
      .same_spec = !knows_specs || first.layer.spec_hash == second.layer.spec_hash};
  const record::TokenIndex own(first);
  const record::TokenIndex other(second);
  for (const TokenKey& token : own.tokens()) {
    const int64_t row = other.row_of(token);
    if (row < 0) {
      ++layer.only_in_first;
      continue;
    }
    compare_token(token, Row::of(first, own.row_of(token)), Row::of(second, row), most_examples,
                  layer, examples);
  }
  layer.only_in_second = std::ssize(other.tokens()) - layer.compared;
  return layer;
}

}  // namespace

bool RoutingComparison::equal() const noexcept {
  return only_in_first.empty() && only_in_second.empty() &&
         std::ranges::all_of(layers, &LayerDifferences::equal);
}

RoutingComparison compare_routing(const RoutingRecord& first, const RoutingRecord& second,
                                  int64_t most_examples) {
  record::check_record(first);
  record::check_record(second);
  RoutingComparison comparison;
  for (const RecordedRows& rows : first.layers) {
    const RecordedRows* const other = second.find(rows.layer.layer);
    if (other == nullptr) {
      comparison.only_in_first.push_back(rows.layer.layer);
      continue;
    }
    comparison.layers.push_back(compare_layer(rows, *other, most_examples, comparison.examples));
  }
  for (const RecordedRows& rows : second.layers) {
    if (first.find(rows.layer.layer) == nullptr) {
      comparison.only_in_second.push_back(rows.layer.layer);
    }
  }
  return comparison;
}

}  // namespace conclave::inline v0
