// Limits of a call at their seams: flags of each token, sums of a budget, routers made once.
#include "routing/limits.h"

#include "routing/expert_budget.h"
#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <thread>
#include <vector>

namespace conclave::routing {
namespace {

using testing::code_of;

TEST(DropBanned, EachToken_HasItsOwnFlags) {
  const std::vector<uint8_t> flags = {1, 0, 0,   // token 0 may not have expert 0
                                      0, 0, 1};  // token 1 not expert 2
  std::vector<int32_t> ids = {0, 1, -1, 0, 2, 1};
  std::vector<float> weights = {1, 2, 3, 4, 5, 6};
  drop_banned(2, 3, {.rows = flags.data(), .stride = 3}, ids.data(), weights.data());
  EXPECT_EQ(ids, (std::vector<int32_t>{-1, 1, -1, 0, -1, 1}));
  EXPECT_EQ(weights, (std::vector<float>{0, 2, 3, 4, 0, 6}));
}

TEST(ExpertBans, OfEachToken_JoinThoseOfABudget) {
  const std::vector<uint8_t> flags = {1, 0, 0, 0, 0, 1};
  const ExpertBans bans({0, 1, 0}, {.rows = flags.data(), .stride = 3}, 2);
  EXPECT_TRUE(bans.by_token());
  const Banned joined = bans.banned();
  const std::vector<uint8_t> found(joined.rows, joined.rows + 6);
  EXPECT_EQ(found, (std::vector<uint8_t>{1, 1, 0, 0, 1, 1}));
  const ExpertBans alone({0, 1, 0}, {}, 2);
  EXPECT_FALSE(alone.by_token());
  EXPECT_TRUE(alone.banned().is(1, 1));
}

ExpertWeightSums sums_of(const std::vector<int32_t>& ids, const std::vector<float>& weights) {
  ExpertWeightSums sums(4);
  sums.add({.num_tokens = std::ssize(ids),
            .top_k = 1,
            .topk_ids = ids.data(),
            .topk_weights = weights.data()});
  return sums;
}

TEST(ExpertWeightSums, WeightsThatAreNotFinite_CountAsNothing) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto sums =
      sums_of({0, 1, 2, 3}, {kInfinity, 0.5F, std::numeric_limits<float>::quiet_NaN(), 0.25F});
  EXPECT_EQ(sums.left_out(2, 1), (std::vector<uint8_t>{1, 0, 1, 0, 0}));
}

// None of the three has a high word, their sum has one of 2.
TEST(ExpertWeightSums, SmallWeights_CarryTheirSum) {
  const float small = 0x1.8p-10F;
  const auto sums = sums_of({0, 1, 1, 1, 2}, {0x1p-9F, small, small, small, 0x1p-12F});
  EXPECT_EQ(sums.left_out(1, 0), (std::vector<uint8_t>{1, 0, 1, 1}));
}

TEST(ExpertWeightSums, ExpertsOfNoWeight_AreUsedAsWell) {
  const auto sums = sums_of({0, 2}, {0.5F, 0});
  EXPECT_EQ(sums.num_used(), 2);
  EXPECT_EQ(sums.left_out(2, 0), (std::vector<uint8_t>{0, 1, 0, 1}));
}

class Silent final : public Router {
 public:
  explicit Silent(size_t bytes) : bytes_(bytes) {}
  size_t scratch_bytes(int32_t) const override { return bytes_; }
  RouterStats route(const RouterInput&, const RouterOutput&, Executor&) const override {
    return {};
  }

 private:
  size_t bytes_;
};

MoeSpec spec_of_four() { return testing::make_spec(8, 4, 24, 16, DType::kF32); }

// A second call that comes while the router is made waits for it.
TEST(FewerChoices, ARouter_IsMadeOnce) {
  std::atomic<int> made = 0;
  FewerChoices fewer(spec_of_four(), [&](const MoeSpec& spec) {
    EXPECT_EQ(spec.top_k, 2);
    ++made;
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    return std::make_unique<Silent>(64);
  });
  std::thread other([&] { fewer.of(2, 64, 1); });
  const Router& mine = fewer.of(2, 64, 1);
  other.join();
  EXPECT_EQ(made, 1);
  EXPECT_EQ(&fewer.of(2, 64, 1), &mine);
}

TEST(FewerChoices, MoreMemoryThanIsThere_IsRefused) {
  FewerChoices fewer(spec_of_four(), [](const MoeSpec& spec) {
    return std::make_unique<Silent>(spec.top_k == 3 ? 65 : 64);
  });
  EXPECT_EQ(code_of([&] { fewer.of(3, 64, 1); }), ErrorCode::kUnsupported);
  EXPECT_EQ(code_of([&] { fewer.of(3, 64, 1); }), ErrorCode::kUnsupported) << "it is not kept";
  EXPECT_EQ(code_of([&] { fewer.of(2, 64, 1); }), ErrorCode{0});
}

}  // namespace
}  // namespace conclave::routing
