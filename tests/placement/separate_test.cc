#include "placement/balance/rule.h"

#include "conclave/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using placement::Packs;

using Loads = std::vector<double>;

int64_t copies(const std::vector<int32_t>& rank, int32_t expert) {
  return std::ranges::count(rank, expert);
}

double load_of(const std::vector<int32_t>& rank, const Loads& share) {
  double load = 0;
  for (const int32_t expert : rank) load += share[static_cast<size_t>(expert)];
  return load;
}

// The rule as it reads, by a look at every slot of every other rank.
bool swap_plainly(const Loads& share, size_t rank, size_t slot,
                  std::span<std::vector<int32_t>> all) {
  const int32_t expert = all[rank][slot];
  std::vector<std::tuple<double, size_t, size_t>> swaps;
  for (size_t other = 0; other < all.size(); ++other) {
    if (copies(all[other], expert) > 0) continue;
    for (size_t at = 0; at < all[other].size(); ++at) {
      const int32_t candidate = all[other][at];
      if (copies(all[rank], candidate) > 0 && copies(all[other], candidate) < 2) continue;
      const double moved =
          share[static_cast<size_t>(expert)] - share[static_cast<size_t>(candidate)];
      const double heavier =
          std::max(load_of(all[rank], share) - moved, load_of(all[other], share) + moved);
      swaps.emplace_back(heavier, other, at);
    }
  }
  if (swaps.empty()) return false;
  const auto [heavier, other, at] = std::ranges::min(swaps);
  std::swap(all[rank][slot], all[other][at]);
  return true;
}

void separate_plainly(const Loads& share, std::span<std::vector<int32_t>> all) {
  for (bool swapped = true; swapped;) {
    swapped = false;
    for (size_t rank = 0; rank < all.size(); ++rank) {
      for (size_t slot = 0; slot < all[rank].size(); ++slot) {
        if (copies(all[rank], all[rank][slot]) < 2) continue;
        swapped = swap_plainly(share, rank, slot, all) || swapped;
      }
    }
  }
}

class Draw {
 public:
  explicit Draw(uint32_t seed) : random_(seed) {}

  size_t below(size_t end) { return random_() % end; }
  // Many equal shares, some that are zero, far apart or below the least normal number.
  Loads shares(size_t experts) {
    const size_t kind = below(5);
    Loads shares(experts);
    for (double& share : shares) {
      if (kind == 0) share = static_cast<double>(below(1000)) / 7;
      if (kind == 1) share = 3;
      if (kind == 2) share = static_cast<double>(below(3));
      if (kind == 3) share = std::ldexp(1.0, static_cast<int>(below(60)));
      if (kind == 4) share = std::ldexp(1.0 / static_cast<double>(1 + below(9)), -1060);
    }
    return shares;
  }
  Packs packs(size_t experts) {
    Packs ranks(1 + below(9));
    const size_t common = 1 + experts / 4;
    for (size_t left = below(4 * experts + 1); left > 0; --left) {
      const size_t expert = below(below(3) > 0 ? experts : common);
      ranks[below(ranks.size())].push_back(static_cast<int32_t>(expert));
    }
    return ranks;
  }

 private:
  std::mt19937 random_;
};

TEST(Separate, SwapsAsAPlainSearchWould) {
  Draw draw(71);
  int changed = 0;
  for (int round = 0; round < 1500; ++round) {
    const size_t experts = 1 + draw.below(20);
    const Loads share = draw.shares(experts);
    const Packs before = draw.packs(experts);
    const size_t first = draw.below(before.size());
    const size_t last = first + 1 + draw.below(before.size() - first);
    Packs expected = before;
    separate_plainly(share, std::span(expected).subspan(first, last - first));
    Packs found = before;
    placement::separate(share, first, last, found);
    ASSERT_EQ(found, expected) << "round " << round << " of seed 71";
    if (found != before) ++changed;
  }
  EXPECT_GT(changed, 200);
}

// Without trees this would take minutes, as each expert begins with both replicas on one rank.
TEST(Separate, TenThousandsOfPairs_ComeApart) {
  constexpr int64_t kExperts = 32768;
  for (const int32_t ranks : {2, 64, 4096}) {
    const Loads load(kExperts, 5);
    const ExpertSlots slots =
        balance_experts(load, {.rule = "surviving",
                               .num_ranks = ranks,
                               .num_redundant_experts = static_cast<int32_t>(kExperts)});
    EXPECT_TRUE(survives_any_rank(slots)) << ranks;
    EXPECT_EQ(balancedness(load, slots), 1) << ranks;
    EXPECT_EQ(moved_experts(slots, slots), 0) << ranks;
  }
}

}  // namespace
}  // namespace conclave
