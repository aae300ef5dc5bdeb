#include "conclave/balance.h"

#include "core/max_places.h"
#include "core/max_ranks.h"
#include "placement/balance/rule.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace conclave::inline v0 {
namespace {

using placement::Packs;

constexpr std::array kRules = {
    placement::BalanceRule{"hierarchical", placement::balance_hierarchical},
    placement::BalanceRule{"global", placement::balance_global},
    placement::BalanceRule{"surviving", placement::balance_surviving},
    placement::BalanceRule{"steady", placement::balance_steady},
};
constexpr auto kNames = [] {
  std::array<std::string_view, kRules.size()> names{};
  std::ranges::transform(kRules, names.begin(), &placement::BalanceRule::name);
  return names;
}();

[[noreturn]] void refuse(const char* field, std::string what, std::string expected,
                         std::string found) {
  throw Error(ErrorCode::kInvalidArgument, {.what = std::move(what),
                                            .tensor = field,
                                            .expected = std::move(expected),
                                            .found = std::move(found)});
}

void check_range(const char* field, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return;
  refuse(field, "a size is out of range", fmt::format("{} to {}", least, most),
         std::to_string(value));
}

void check_load(std::span<const double> load) {
  if (load.empty() || load.size() > size_t{kMaxPlaces}) {
    refuse("load", "the load has an entry for each expert",
           fmt::format("1 to {} entries", kMaxPlaces), fmt::format("{} entries", load.size()));
  }
  for (size_t expert = 0; expert < load.size(); ++expert) {
    if (std::isfinite(load[expert]) && load[expert] >= 0) continue;
    refuse("load", "a load is no number of rows", "finite and not negative",
           fmt::format("{} of expert {}", load[expert], expert));
  }
  if (std::ranges::all_of(load, [](double rows) { return rows == 0; })) {
    refuse("load", "no expert had a row, so that nothing tells them apart",
           "a positive load of some expert", "zeros");
  }
}

void check_request(int64_t num_experts, const BalanceRequest& request) {
  check_range("num_ranks", request.num_ranks, 1, kMaxRanks);
  check_range("num_redundant_experts", request.num_redundant_experts, 0, kMaxPlaces - num_experts);
  check_range("num_nodes", request.num_nodes, 1, kMaxRanks);
  check_range("num_groups", request.num_groups, 1, INT32_MAX);
  if (!(request.least_gain >= 0 && request.least_gain <= 1)) {
    refuse("least_gain", "the least gain is a part of a load", "0 to 1",
           fmt::format("{}", request.least_gain));
  }
  const int64_t slots = num_experts + request.num_redundant_experts;
  if (request.previous.empty()) return;
  if (static_cast<int64_t>(request.previous.size()) != slots) {
    refuse("previous", "what was before has an expert for each slot",
           fmt::format("{} entries", slots), fmt::format("{} entries", request.previous.size()));
  }
  for (const int32_t expert : request.previous) {
    if (expert >= 0 && expert < num_experts) continue;
    refuse("previous", "a slot of an expert that does not exist",
           fmt::format("0 to {}", num_experts - 1), std::to_string(expert));
  }
}

const placement::BalanceRule& rule_of(const std::string& name) {
  const auto found = std::ranges::find(kRules, name, &placement::BalanceRule::name);
  if (found != kRules.end()) return *found;
  refuse("rule", "no rule has this name", fmt::format("{}", fmt::join(kNames, ", ")), name);
}

void check_slots(const ExpertSlots& slots) {
  check_range("num_experts", slots.num_experts, 0, kMaxPlaces);
  const bool ends_agree = slots.first_of.size() > 1 && slots.first_of.front() == 0 &&
                          slots.first_of.back() == static_cast<int64_t>(slots.logical_of.size()) &&
                          std::ranges::is_sorted(slots.first_of);
  if (!ends_agree) {
    refuse("first_of", "ranks hold consecutive slots",
           fmt::format("0 to {}, ascending", slots.logical_of.size()), "other numbers");
  }
  for (const int32_t expert : slots.logical_of) {
    if (expert >= 0 && expert < slots.num_experts) continue;
    refuse("logical_of", "a slot of an expert that does not exist",
           fmt::format("0 to {}", slots.num_experts - 1), std::to_string(expert));
  }
}

std::vector<int32_t> counts_of(const ExpertSlots& slots) {
  std::vector<int32_t> counts(static_cast<size_t>(slots.num_experts));
  for (const int32_t expert : slots.logical_of) ++counts[static_cast<size_t>(expert)];
  return counts;
}

// Experts that were on the rank before take their slots again; the others fill the rest in order.
// `waiting` [E] has zeros, before and after.
void keep_slots(std::span<const int32_t> previous, std::vector<int32_t>& experts,
                std::vector<int32_t>& waiting) {
  const auto replicas = [&waiting](int32_t expert) -> int32_t& {
    return waiting[static_cast<size_t>(expert)];
  };
  for (const int32_t expert : experts) ++replicas(expert);
  std::vector<int32_t> kept(experts.size(), -1);
  for (size_t slot = 0; slot < kept.size(); ++slot) {
    if (replicas(previous[slot]) == 0) continue;
    --replicas(previous[slot]);
    kept[slot] = previous[slot];
  }
  // The first replicas of an expert have found their slots, so that the last ones wait.
  auto next = experts.rbegin();
  for (size_t slot = kept.size(); slot-- > 0;) {
    if (kept[slot] >= 0) continue;
    while (replicas(*next) == 0) ++next;
    --replicas(*next);
    kept[slot] = *next++;
  }
  experts = std::move(kept);
}

}  // namespace

std::span<const std::string_view> balance_rules() { return kNames; }

ExpertSlots balance_experts(std::span<const double> load, const BalanceRequest& request) {
  check_load(load);
  const auto num_experts = static_cast<int64_t>(load.size());
  check_request(num_experts, request);
  const placement::BalanceRule& rule = rule_of(request.rule);
  // Sums of what is finite may not be.
  const double largest = std::ranges::max(load);
  std::vector<double> scaled;
  if (!std::isfinite(largest * static_cast<double>(num_experts))) {
    for (const double rows : load) scaled.push_back(rows / largest);
    load = scaled;
  }
  Packs ranks = rule.balance(load, request);
  ExpertSlots slots{.num_experts = num_experts, .first_of = {0}};
  std::vector<int32_t> waiting(load.size());
  for (std::vector<int32_t>& experts : ranks) {
    const auto first = static_cast<size_t>(slots.first_of.back());
    if (!request.previous.empty()) {
      keep_slots(std::span(request.previous).subspan(first, experts.size()), experts, waiting);
    }
    std::ranges::copy(experts, std::back_inserter(slots.logical_of));
    slots.first_of.push_back(static_cast<int32_t>(slots.logical_of.size()));
  }
  return slots;
}

double balancedness(std::span<const double> load, const ExpertSlots& slots) {
  check_load(load);
  check_slots(slots);
  if (static_cast<int64_t>(load.size()) != slots.num_experts) {
    refuse("load", "the load has an entry for each expert",
           fmt::format("{} entries", slots.num_experts), fmt::format("{} entries", load.size()));
  }
  const std::vector<int32_t> counts = counts_of(slots);
  const double largest_load = std::ranges::max(load);
  double sum = 0;
  double largest = 0;
  for (int32_t rank = 0; rank < slots.num_ranks(); ++rank) {
    double rows = 0;
    for (const int32_t expert : slots.of_rank(rank)) {
      const auto at = static_cast<size_t>(expert);
      rows += load[at] / largest_load / counts[at];
    }
    sum += rows;
    largest = std::max(largest, rows);
  }
  if (largest == 0) return 1;  // the experts that had rows are in no slot
  return sum / slots.num_ranks() / largest;
}

bool survives_any_rank(const ExpertSlots& slots) {
  check_slots(slots);
  std::vector<int32_t> ranks(static_cast<size_t>(slots.num_experts));
  std::vector<int32_t> last_rank(ranks.size(), -1);
  for (int32_t rank = 0; rank < slots.num_ranks(); ++rank) {
    for (const int32_t expert : slots.of_rank(rank)) {
      const auto at = static_cast<size_t>(expert);
      if (last_rank[at] != rank) ++ranks[at];
      last_rank[at] = rank;
    }
  }
  return std::ranges::all_of(ranks, [](int32_t count) { return count >= 2; });
}

int64_t moved_experts(const ExpertSlots& before, const ExpertSlots& after) {
  check_slots(before);
  check_slots(after);
  if (before.num_experts != after.num_experts || before.num_ranks() != after.num_ranks()) {
    refuse("after", "two placements of different layers",
           fmt::format("{} experts on {} ranks", before.num_experts, before.num_ranks()),
           fmt::format("{} experts on {} ranks", after.num_experts, after.num_ranks()));
  }
  int64_t moved = 0;
  std::vector<int32_t> there(static_cast<size_t>(before.num_experts));  // slots on one rank
  for (int32_t rank = 0; rank < after.num_ranks(); ++rank) {
    for (const int32_t expert : before.of_rank(rank)) ++there[static_cast<size_t>(expert)];
    for (const int32_t expert : after.of_rank(rank)) {
      if (--there[static_cast<size_t>(expert)] < 0) ++moved;
    }
    for (const int32_t expert : before.of_rank(rank)) there[static_cast<size_t>(expert)] = 0;
    for (const int32_t expert : after.of_rank(rank)) there[static_cast<size_t>(expert)] = 0;
  }
  return moved;
}

ParallelSpec with_slots(const ParallelSpec& parallel, const ExpertSlots& slots) {
  check_slots(slots);
  ParallelSpec split = parallel;
  split.ep_size = slots.num_ranks();
  split.placement = PlacementStrategy::kCustom;
  split.rank_of.assign(static_cast<size_t>(slots.num_experts), -1);
  split.replica_of.clear();
  std::vector<int32_t> ranks_of_replicas;
  for (int32_t rank = 0; rank < slots.num_ranks(); ++rank) {
    for (const int32_t expert : slots.of_rank(rank)) {
      int32_t& first = split.rank_of[static_cast<size_t>(expert)];
      if (first < 0) {
        first = rank;
        continue;
      }
      split.replica_of.push_back(expert);
      ranks_of_replicas.push_back(rank);
    }
  }
  split.num_redundant_experts = static_cast<int32_t>(split.replica_of.size());
  std::ranges::copy(ranks_of_replicas, std::back_inserter(split.rank_of));
  return split;
}

}  // namespace conclave::inline v0
