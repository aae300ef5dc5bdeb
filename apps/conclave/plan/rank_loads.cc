#include "plan/rank_loads.h"

#include <algorithm>
#include <numeric>

namespace conclave::tool {
namespace {

constexpr double kSumBytes = 4;      // a number that ranks add up, or that comes home to be added
constexpr double kRoundedBytes = 2;  // a number of a sum that was rounded for its way home

// Copies that cross a link of a node: those for ranks of the home's node, and those that came over
// the network, unless the GPU at which they arrive has the expert.
double copies_on_links(const GroupShape& group, double all, double within_node) {
  const double arriving = all - within_node;
  return within_node + arriving * (group.per_node - 1) / group.per_node;
}

}  // namespace

PlacedLayer place_layer(const Strategy& strategy, const Cluster& cluster, const ModelLayer& layer,
                        const LayerLoad& load) {
  PlacedLayer placed{.strategy = strategy,
                     .layer = layer,
                     .sizes = layer_sizes(layer, strategy.tp),
                     .slots = place_experts(strategy, cluster, layer.spec, load.first()),
                     .copies = {}};
  if (strategy.ep > 1) {
    placed.copies = load.copies(placed.slots, expert_group_shape(cluster, strategy));
  }
  return placed;
}

TravelBytes travel_bytes(const PlacedLayer& placed, const PlanRequest& request, double tokens) {
  if (placed.strategy.ep == 1) return {};
  const GroupShape group = expert_group_shape(request.cluster, placed.strategy);
  const LayerLoad::Copies& copies = placed.copies;
  // Each rank of a tensor group brings all the tokens of its group.
  const double own = tokens * placed.strategy.tp;
  const auto width = static_cast<double>(expert_width(placed.layer.spec));
  const double out = own * width * request.dispatch_bits / 8;
  const bool rounded = request.combine == EpCombine::kRoundedPerRank;
  const double home = own * width * (rounded ? kRoundedBytes : kSumBytes);
  const double links = copies_on_links(group, copies.to_ranks, copies.within_node);
  TravelBytes bytes{.dispatch = {links * out, copies.to_nodes * out},
                    .combine = {links * home, copies.to_nodes * home}};
  if (request.combine == EpCombine::kUnreduced) {
    const double unreduced =
        copies_on_links(group, copies.choices_elsewhere, copies.choices_within_node);
    bytes.combine = {unreduced * home,
                     (copies.choices_elsewhere - copies.choices_within_node) * home};
  }
  return bytes;
}

BatchTimes batch_times(const PlacedLayer& placed, const PlanRequest& request,
                       const LoadBatch& batch) {
  const Strategy& strategy = placed.strategy;
  const ProductKind kind = product_kind(placed.layer.spec);
  const std::vector<double> of_slots = slot_rows(placed.slots, batch.rows, batch.whole);
  const double tokens = batch.tokens / strategy.group();
  const double own = tokens * strategy.tp;
  BatchTimes times;
  for (int32_t rank = 0; rank < placed.slots.num_ranks(); ++rank) {
    ExpertWork work;
    for (const ExpertSize& size : placed.sizes.common) work.add(size, own);
    double sum = 0;
    const auto begin = static_cast<size_t>(placed.slots.first_of[static_cast<size_t>(rank)]);
    for (const double each :
         std::span(of_slots).subspan(begin, placed.slots.of_rank(rank).size())) {
      work.add(placed.sizes.expert, each);
      sum += each;
    }
    times.rank_rows.push_back(sum);
    times.compute_us = std::max(times.compute_us, work.microseconds(request.cluster, kind));
  }
  times.most_rows = std::ranges::max(times.rank_rows);
  const double all = std::accumulate(times.rank_rows.begin(), times.rank_rows.end(), 0.0);
  const double mean = all / static_cast<double>(times.rank_rows.size());
  if (times.most_rows > 0) times.balance = mean / times.most_rows;

  // The busiest rank takes and gives rows as it has them.
  const double busiest = times.balance > 0 ? 1 / times.balance : 1;
  const GroupShape group = expert_group_shape(request.cluster, strategy);
  TravelBytes bytes = travel_bytes(placed, request, tokens);
  for (RowExchange* exchange : {&bytes.dispatch, &bytes.combine}) {
    exchange->node_bytes *= busiest;
    if (strategy.ep == 1) continue;
    times.exchange_us += row_exchange_microseconds(request.cluster, group, *exchange);
  }
  if (strategy.tp > 1) {
    const GroupShape slices = strategy.ep == 1 ? group_shape(request.cluster, strategy)
                                               : GroupShape{.nodes = 1, .per_node = strategy.tp};
    times.exchange_us += all_reduce_microseconds(
        request.cluster, slices,
        own * static_cast<double>(placed.layer.spec.hidden_size) * kSumBytes);
  }
  return times;
}

}  // namespace conclave::tool
