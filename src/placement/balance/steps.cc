#include "placement/balance/rule.h"

#include <algorithm>
#include <numeric>
#include <queue>

namespace conclave::inline v0::placement {
std::vector<int32_t> capacities(int64_t num_slots, int32_t num_ranks) {
  std::vector<int32_t> slots(static_cast<size_t>(num_ranks),
                             static_cast<int32_t>(num_slots / num_ranks));
  for (int64_t rank = 0; rank < num_slots % num_ranks; ++rank) ++slots[static_cast<size_t>(rank)];
  return slots;
}

Replicas replicate(std::span<const double> load, int64_t num_slots, ReplicaLimits limits) {
  Replicas found{.expert_of = {}, .count = std::vector<int32_t>(load.size(), limits.least)};
  found.expert_of.reserve(static_cast<size_t>(num_slots));
  for (int32_t replica = 0; replica < limits.least; ++replica) {
    for (size_t expert = 0; expert < load.size(); ++expert) {
      found.expert_of.push_back(static_cast<int32_t>(expert));
    }
  }
  struct Candidate {
    double share = 0;  // rows of each replica
    int32_t expert = 0;
  };
  const auto colder = [](const Candidate& one, const Candidate& other) {
    return one.share != other.share ? one.share < other.share : one.expert > other.expert;
  };
  std::priority_queue<Candidate, std::vector<Candidate>, decltype(colder)> hottest(colder);
  std::vector<Candidate> full;
  const auto offer = [&](int32_t expert) {
    const auto at = static_cast<size_t>(expert);
    const Candidate candidate{.share = load[at] / found.count[at], .expert = expert};
    if (found.count[at] < limits.most) {
      hottest.push(candidate);
    } else {
      full.push_back(candidate);
    }
  };
  for (size_t expert = 0; expert < load.size(); ++expert) offer(static_cast<int32_t>(expert));
  while (static_cast<int64_t>(found.expert_of.size()) < num_slots) {
    if (hottest.empty()) {
      limits.most = INT32_MAX;
      for (const Candidate& candidate : full) hottest.push(candidate);
    }
    const int32_t expert = hottest.top().expert;
    hottest.pop();
    ++found.count[static_cast<size_t>(expert)];
    found.expert_of.push_back(expert);
    offer(expert);
  }
  return found;
}

Packs pack(std::span<const double> weights, std::span<const int32_t> capacities) {
  Packs packs(capacities.size());
  if (std::ranges::all_of(capacities, [](int32_t capacity) { return capacity <= 1; })) {
    for (size_t item = 0; item < weights.size(); ++item) {
      packs[item].push_back(static_cast<int32_t>(item));
    }
    return packs;
  }
  std::vector<int32_t> order(weights.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int32_t one, int32_t other) {
    return weights[static_cast<size_t>(one)] > weights[static_cast<size_t>(other)];
  });
  struct Open {
    double sum = 0;
    size_t pack = 0;
  };
  const auto heavier = [](const Open& one, const Open& other) {
    return one.sum != other.sum ? one.sum > other.sum : one.pack > other.pack;
  };
  std::priority_queue<Open, std::vector<Open>, decltype(heavier)> lightest(heavier);
  for (size_t at = 0; at < packs.size(); ++at) {
    if (capacities[at] > 0) lightest.push({.pack = at});
  }
  for (const int32_t item : order) {
    Open open = lightest.top();
    lightest.pop();
    packs[open.pack].push_back(item);
    open.sum += weights[static_cast<size_t>(item)];
    if (static_cast<int32_t>(packs[open.pack].size()) < capacities[open.pack]) lightest.push(open);
  }
  return packs;
}

}  // namespace conclave::inline v0::placement
