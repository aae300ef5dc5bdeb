#include "support/cuda/routings.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

namespace conclave::testing {

namespace {

// Draws k distinct experts with the given cumulative probabilities (k is at most their number).
void draw_distinct(std::span<const double> cumulative, std::span<int32_t> ids,
                   std::mt19937_64& random) {
  std::uniform_real_distribution<double> uniform(0.0, cumulative.back());
  for (size_t chosen = 0; chosen < ids.size();) {
    const auto at = std::upper_bound(cumulative.begin(), cumulative.end(), uniform(random));
    const auto id = static_cast<int32_t>(
        std::min<int64_t>(at - cumulative.begin(), static_cast<int64_t>(cumulative.size()) - 1));
    if (std::find(ids.begin(), ids.begin() + static_cast<int64_t>(chosen), id) ==
        ids.begin() + static_cast<int64_t>(chosen)) {
      ids[chosen++] = id;
    }
  }
}

std::vector<double> probabilities(const RoutingShape& shape) {
  std::vector<double> weight(static_cast<size_t>(shape.num_experts), 1.0);
  if (shape.kind == RoutingKind::kZipf) {
    for (size_t i = 0; i < weight.size(); ++i) weight[i] = 1.0 / static_cast<double>(i + 1);
    std::mt19937_64 random(shape.seed + 17);
    std::shuffle(weight.begin(), weight.end(), random);
  }
  // Only the lower half is drawn from, but never fewer than k.
  if (shape.kind == RoutingKind::kOneHot) {
    weight.resize(static_cast<size_t>(std::max(shape.top_k, shape.num_experts / 2)));
  }
  std::partial_sum(weight.begin(), weight.end(), weight.begin());
  return weight;
}

void heat_one(std::span<int32_t> ids, int32_t hot) {
  const auto at = std::find(ids.begin(), ids.end(), hot);
  if (at == ids.end()) {
    ids[0] = hot;
  } else {
    std::swap(*at, ids[0]);
  }
}

}  // namespace

HostRouting make_routing(const RoutingShape& shape) {
  std::mt19937_64 random(shape.seed);
  const auto k = static_cast<size_t>(shape.top_k);
  const std::vector<double> cumulative = probabilities(shape);
  HostRouting routing;
  routing.ids.resize(static_cast<size_t>(shape.num_tokens) * k);
  routing.weights.resize(routing.ids.size());
  std::uniform_real_distribution<float> share(0.2F, 1.0F);
  std::uniform_int_distribution<int> fifth(0, 4);
  for (size_t begin = 0; begin < routing.ids.size(); begin += k) {
    const std::span<int32_t> ids = std::span(routing.ids).subspan(begin, k);
    const std::span<float> weights = std::span(routing.weights).subspan(begin, k);
    draw_distinct(cumulative, ids, random);
    if (shape.kind == RoutingKind::kOneHot) {
      heat_one(ids, static_cast<int32_t>(shape.num_experts / 2));
    }
    for (float& weight : weights) weight = share(random);
    const float sum = std::accumulate(weights.begin(), weights.end(), 0.0F);
    for (float& weight : weights) weight /= sum;
    if (shape.kind != RoutingKind::kHoles) continue;
    for (int32_t& id : ids) id = fifth(random) == 0 ? -1 : id;
  }
  return routing;
}

HostGroups group_rows(std::span<const int32_t> ids, int64_t num_experts, int32_t tile_tokens) {
  HostGroups groups;
  groups.expert_begin.assign(static_cast<size_t>(num_experts) + 1, 0);
  for (const int32_t id : ids) {
    if (id >= 0 && id < num_experts) ++groups.expert_begin[static_cast<size_t>(id) + 1];
  }
  std::partial_sum(groups.expert_begin.begin(), groups.expert_begin.end(),
                   groups.expert_begin.begin());
  std::vector<int32_t> next(groups.expert_begin.begin(), groups.expert_begin.end() - 1);
  groups.row_slot.resize(static_cast<size_t>(groups.expert_begin.back()));
  groups.slot_row.assign(ids.size(), -1);
  for (size_t slot = 0; slot < ids.size(); ++slot) {
    if (ids[slot] < 0 || ids[slot] >= num_experts) continue;
    const int32_t row = next[static_cast<size_t>(ids[slot])]++;
    groups.row_slot[static_cast<size_t>(row)] = static_cast<int32_t>(slot);
    groups.slot_row[slot] = row;
  }
  for (int32_t expert = 0; expert < num_experts; ++expert) {
    const int32_t end = groups.expert_begin[static_cast<size_t>(expert) + 1];
    for (int32_t row = groups.expert_begin[static_cast<size_t>(expert)]; row < end;
         row += tile_tokens) {
      groups.tiles.push_back(
          {.expert = expert, .begin = row, .count = std::min(tile_tokens, end - row)});
    }
  }
  return groups;
}

}  // namespace conclave::testing
