#include "placement/balance/rule.h"

#include "conclave/error.h"

#include <algorithm>
#include <numeric>
#include <string>

namespace conclave::inline v0::placement {
namespace {

// How experts and ranks come in groups and nodes.
struct Shape {
  int32_t num_nodes = 1;
  int64_t num_groups = 1;
};

// A node must have room for its experts.
Shape usable_shape(int64_t num_experts, const BalanceRequest& request) {
  const bool even_ranks = request.num_ranks % request.num_nodes == 0;
  const Shape shape{.num_nodes = even_ranks ? request.num_nodes : 1,
                    .num_groups = request.num_groups};
  if (num_experts % shape.num_groups != 0 || shape.num_groups % shape.num_nodes != 0) return {};
  const std::vector<int32_t> slots =
      capacities(num_experts + request.num_redundant_experts, request.num_ranks);
  const auto ranks = static_cast<std::ptrdiff_t>(request.num_ranks / shape.num_nodes);
  const int64_t last_node = std::accumulate(slots.end() - ranks, slots.end(), int64_t{0});
  return last_node >= num_experts / shape.num_nodes ? shape : Shape{};
}

// The experts of each node: whole groups, the heaviest first.
Packs experts_of_nodes(std::span<const double> load, const Shape& shape) {
  const auto group_size = static_cast<int64_t>(load.size()) / shape.num_groups;
  std::vector<double> of_group;
  for (int64_t group = 0; group < shape.num_groups; ++group) {
    const auto begin = load.begin() + group * group_size;
    of_group.push_back(std::accumulate(begin, begin + group_size, 0.0));
  }
  Packs nodes = pack(of_group, capacities(shape.num_groups, shape.num_nodes));
  for (std::vector<int32_t>& groups : nodes) {
    std::vector<int32_t> experts;
    for (const int32_t group : groups) {
      for (int64_t i = 0; i < group_size; ++i) {
        experts.push_back(static_cast<int32_t>(group * group_size + i));
      }
    }
    groups = std::move(experts);
  }
  return nodes;
}

// Makes replicas of some experts and packs them onto ranks with `slots` slots each.
Packs balance_node(std::span<const double> load, const std::vector<int32_t>& experts,
                   std::span<const int32_t> slots, int32_t least, bool distinct_ranks) {
  std::vector<double> own;
  for (const int32_t expert : experts) own.push_back(load[static_cast<size_t>(expert)]);
  const int64_t num_slots = std::accumulate(slots.begin(), slots.end(), int64_t{0});
  ReplicaLimits limits{.least = least};
  if (distinct_ranks) {
    limits.most =
        static_cast<int32_t>(std::ranges::count_if(slots, [](int32_t n) { return n > 0; }));
  }
  const Replicas replicas = replicate(own, num_slots, limits);
  std::vector<double> share;
  for (size_t i = 0; i < own.size(); ++i) share.push_back(own[i] / replicas.count[i]);
  std::vector<double> weights;
  for (const int32_t expert : replicas.expert_of) {
    weights.push_back(share[static_cast<size_t>(expert)]);
  }
  Packs ranks = pack(weights, slots);
  for (std::vector<int32_t>& rank : ranks) {
    for (int32_t& item : rank) item = replicas.expert_of[static_cast<size_t>(item)];
  }
  if (distinct_ranks) separate(share, 0, ranks.size(), ranks);
  for (std::vector<int32_t>& rank : ranks) {
    for (int32_t& item : rank) item = experts[static_cast<size_t>(item)];
  }
  return ranks;
}

Packs balance_in(const Shape& shape, std::span<const double> load, const BalanceRequest& request,
                 int32_t least) {
  const auto num_slots = static_cast<int64_t>(load.size()) + request.num_redundant_experts;
  const std::vector<int32_t> slots = capacities(num_slots, request.num_ranks);
  const auto ranks_a_node = static_cast<size_t>(request.num_ranks / shape.num_nodes);
  const Packs nodes = experts_of_nodes(load, shape);
  Packs ranks;
  for (size_t node = 0; node < nodes.size(); ++node) {
    Packs own =
        balance_node(load, nodes[node], std::span(slots).subspan(node * ranks_a_node, ranks_a_node),
                     least, request.distinct_ranks || least > 1);
    std::ranges::move(own, std::back_inserter(ranks));
  }
  return ranks;
}

}  // namespace

Packs balance_hierarchical(std::span<const double> load, const BalanceRequest& request) {
  const Shape shape = usable_shape(static_cast<int64_t>(load.size()), request);
  return balance_in(shape, load, request, 1);
}

Packs balance_global(std::span<const double> load, const BalanceRequest& request) {
  return balance_in({}, load, request, 1);
}

Packs balance_surviving(std::span<const double> load, const BalanceRequest& request) {
  if (request.num_ranks < 2) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "one rank has no other to survive it",
                                              .tensor = "num_ranks",
                                              .expected = "2 or more for the rule surviving",
                                              .found = std::to_string(request.num_ranks)});
  }
  if (request.num_redundant_experts < static_cast<int64_t>(load.size())) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "an expert without a replica dies with its rank",
                 .tensor = "num_redundant_experts",
                 .expected = std::to_string(load.size()) + " or more for the rule surviving",
                 .found = std::to_string(request.num_redundant_experts)});
  }
  return balance_in({}, load, request, 2);
}

}  // namespace conclave::inline v0::placement
