#include "conclave/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using Ints = std::vector<int32_t>;
using Ranks = std::vector<Ints>;
using Loads = std::vector<double>;

// Whole numbers of rows for up to ten replicas, so that no sum is rounded.
constexpr int32_t kRowsOfTen = 2520;

Loads loads_of(const Ranks& ranks, const Loads& load) {
  Ints count(load.size());
  for (const Ints& rank : ranks) {
    for (const int32_t expert : rank) ++count[static_cast<size_t>(expert)];
  }
  Loads sums;
  for (const Ints& rank : ranks) {
    sums.push_back(std::accumulate(rank.begin(), rank.end(), 0.0, [&](double sum, int32_t expert) {
      const auto at = static_cast<size_t>(expert);
      return sum + load[at] / count[at];
    }));
  }
  return sums;
}

bool holds(const Ints& rank, int32_t expert) { return std::ranges::count(rank, expert) > 0; }

// The best single move as the rule reads, by making each of them; none if none gains enough.
std::optional<Ranks> moved_plainly(const Ranks& ranks, const Loads& load, double gain) {
  const Loads before = loads_of(ranks, load);
  const auto busiest = static_cast<size_t>(std::ranges::max_element(before) - before.begin());
  double least = before[busiest] * (1 - gain);
  std::optional<Ranks> best;
  const auto consider = [&](const Ranks& after, const std::set<size_t>& changed) {
    const Loads sums = loads_of(after, load);
    double heaviest = 0;
    for (const size_t rank : changed) heaviest = std::max(heaviest, sums[rank]);
    if (heaviest >= least) return;
    least = heaviest;
    best = after;
  };
  for (size_t slot = 0; slot < ranks[busiest].size(); ++slot) {
    const int32_t expert = ranks[busiest][slot];
    if (load[static_cast<size_t>(expert)] == 0) continue;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (rank == busiest || holds(ranks[rank], expert)) continue;
      for (size_t other = 0; other < ranks[rank].size(); ++other) {
        const int32_t candidate = ranks[rank][other];
        Ranks after = ranks;
        std::swap(after[busiest][slot], after[rank][other]);
        if (!holds(ranks[busiest], candidate)) consider(after, {busiest, rank});
        after = ranks;
        after[rank][other] = expert;
        const auto has_candidate = [&](const Ints& its) { return holds(its, candidate); };
        if (std::ranges::none_of(after, has_candidate)) continue;
        std::set<size_t> changed;
        for (size_t at = 0; at < ranks.size(); ++at) {
          if (holds(ranks[at], expert) || holds(ranks[at], candidate)) changed.insert(at);
        }
        consider(after, changed);
      }
    }
  }
  return best;
}

TEST(SteadyRule, MovesAsAPlainSearchWould) {
  std::mt19937 random(83);
  const auto below = [&](size_t end) { return random() % end; };
  int moved = 0;
  for (int round = 0; round < 600; ++round) {
    const size_t experts = 2 + below(6);
    const size_t slots = experts + below(11 - experts);
    Loads load(experts);
    for (double& rows : load) rows = static_cast<double>(kRowsOfTen * below(below(2) + 8));
    load[0] = kRowsOfTen;
    Ints previous;
    for (size_t slot = 0; slot < slots; ++slot) {
      previous.push_back(static_cast<int32_t>(slot < experts ? slot : below(experts)));
    }
    std::ranges::shuffle(previous, random);
    const auto num_ranks = static_cast<int32_t>(2 + below(3));
    const ExpertSlots found =
        balance_experts(load, {.rule = "steady",
                               .num_ranks = num_ranks,
                               .num_redundant_experts = static_cast<int32_t>(slots - experts),
                               .previous = previous});
    Ranks ranks;
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      const auto first = previous.begin() + found.first_of[static_cast<size_t>(rank)];
      ranks.emplace_back(first, first + std::ssize(found.of_rank(rank)));
    }
    const Ranks before = ranks;
    while (const auto next = moved_plainly(ranks, load, 0.01)) ranks = *next;
    if (ranks != before) ++moved;
    // Which experts a rank has; those that stayed have their slots again.
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      Ints expected = ranks[static_cast<size_t>(rank)];
      Ints own(found.of_rank(rank).begin(), found.of_rank(rank).end());
      std::ranges::sort(expected);
      std::ranges::sort(own);
      ASSERT_EQ(own, expected) << "rank " << rank << ", round " << round << " of seed 83";
    }
  }
  EXPECT_GT(moved, 200);
}

}  // namespace
}  // namespace conclave
