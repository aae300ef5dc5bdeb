// Slots over other ranks: even, whole, and with as few moves as that allows.
#include "support/layer_fixture.h"

#include "conclave/balance.h"
#include "conclave/regroup.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace conclave {
namespace {

std::vector<int32_t> counts_of(const ExpertSlots& slots) {
  std::vector<int32_t> counts(static_cast<size_t>(slots.num_experts), 0);
  for (const int32_t expert : slots.logical_of) ++counts[static_cast<size_t>(expert)];
  return counts;
}

ExpertSlots random_slots(std::mt19937& random, int32_t experts, int32_t ranks, int32_t slots) {
  ExpertSlots made{.num_experts = experts, .first_of = {0}};
  const auto below = [&](int32_t limit) {
    return std::uniform_int_distribution<int32_t>(0, limit - 1)(random);
  };
  std::vector<int32_t> cuts = {0, slots};
  for (int32_t rank = 1; rank < ranks; ++rank) cuts.push_back(below(slots + 1));
  std::ranges::sort(cuts);
  made.first_of.assign(cuts.begin(), cuts.end());
  for (int32_t slot = 0; slot < slots; ++slot) made.logical_of.push_back(below(experts));
  return made;
}

TEST(SpreadOver, TwoToThree_MovesAThird) {
  const ExpertSlots before = slots_of(12, {.ep_size = 2});
  const ExpertSlots after = spread_over(before, std::vector<int32_t>{0, 1, -1});
  EXPECT_EQ(after.first_of, (std::vector<int32_t>{0, 4, 8, 12}));
  EXPECT_EQ(after.logical_of, (std::vector<int32_t>{0, 1, 2, 3, 6, 7, 8, 9, 4, 5, 10, 11}));
}

TEST(SpreadOver, SameRanks_StayAsTheyAre) {
  const ExpertSlots before = slots_of(10, {.ep_size = 3, .num_redundant_experts = 5});
  const ExpertSlots after = spread_over(before, std::vector<int32_t>{0, 1, 2});
  EXPECT_EQ(after.logical_of, before.logical_of);
  EXPECT_EQ(after.first_of, before.first_of);
}

TEST(SpreadOver, AnySlots_EvenAndApart) {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    SCOPED_TRACE(round);
    const auto draw = [&](int32_t from, int32_t to) {
      return std::uniform_int_distribution<int32_t>(from, to)(random);
    };
    const int32_t experts = draw(1, 12);
    const int32_t ranks = draw(1, 6);
    const ExpertSlots before = random_slots(random, experts, ranks, draw(0, 30));
    std::vector<int32_t> old_ranks(static_cast<size_t>(ranks));
    for (int32_t rank = 0; rank < ranks; ++rank) old_ranks[static_cast<size_t>(rank)] = rank;
    for (int32_t joining = draw(0, 5); joining > 0; --joining) old_ranks.push_back(-1);
    std::ranges::shuffle(old_ranks, random);
    old_ranks.resize(static_cast<size_t>(draw(1, static_cast<int32_t>(old_ranks.size()))));
    const ExpertSlots after = spread_over(before, old_ranks);
    ASSERT_EQ(after.num_ranks(), static_cast<int32_t>(old_ranks.size()));
    const std::vector<int32_t> had = counts_of(before);
    const std::vector<int32_t> has = counts_of(after);
    for (size_t expert = 0; expert < has.size(); ++expert) {
      EXPECT_EQ(has[expert], std::clamp(had[expert], 1, after.num_ranks())) << "expert " << expert;
    }
    const auto share = static_cast<int32_t>(after.logical_of.size()) / after.num_ranks();
    for (int32_t rank = 0; rank < after.num_ranks(); ++rank) {
      const auto own = after.of_rank(rank);
      EXPECT_GE(static_cast<int32_t>(own.size()), share);
      EXPECT_LE(static_cast<int32_t>(own.size()), share + 1);
      EXPECT_EQ(std::set<int32_t>(own.begin(), own.end()).size(), own.size()) << "rank " << rank;
    }
  }
}

TEST(SpreadOver, WrongArguments_AreNamed) {
  const ExpertSlots slots = slots_of(4, {.ep_size = 2});
  const auto refused = [](const ExpertSlots& before, const std::vector<int32_t>& old_ranks,
                          const std::string& field) {
    try {
      spread_over(before, old_ranks);
      ADD_FAILURE() << "no error: " << field;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(error.detail().tensor, field);
    }
  };
  refused(slots, {}, "old_ranks");
  refused(slots, {0, 2}, "old_ranks");
  refused(slots, {-2}, "old_ranks");
  refused(slots, {1, -1, 1}, "old_ranks");
  ExpertSlots wrong = slots;
  wrong.logical_of[2] = 4;
  refused(wrong, {0}, "logical_of");
  wrong = slots;
  wrong.first_of = {0, 3};
  refused(wrong, {0}, "first_of");
  wrong.first_of = {};
  refused(wrong, {0}, "first_of");
  wrong = slots;
  wrong.num_experts = 0;
  refused(wrong, {0}, "num_experts");
}

}  // namespace
}  // namespace conclave
