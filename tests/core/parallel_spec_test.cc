#include "conclave/error.h"
#include "conclave/spec.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

namespace conclave {
namespace {

using Groups = ParallelSpec::Groups;

std::string rejection(const ParallelSpec& parallel) {
  try {
    validate(parallel);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "accepted";
}

void expect_named(const ParallelSpec& parallel, const std::string& field) {
  const std::string message = rejection(parallel);
  EXPECT_NE(message.find("ParallelSpec." + field), std::string::npos) << message;
}

TEST(ParallelSpecFields, ValidOnes_AreAccepted) {
  constexpr auto kCustom = PlacementStrategy::kCustom;
  EXPECT_EQ(rejection({}), "accepted");
  EXPECT_EQ(rejection({.ep_size = 3, .ep_rank = 2, .tp_size = 4, .tp_rank = 3}), "accepted");
  EXPECT_EQ(rejection({.ep_size = 2, .placement = kCustom, .rank_of = {0, 1, 1}}), "accepted");
  EXPECT_EQ(rejection({.placement = kCustom, .rank_of = {0, -1}, .reduce = Reduce::kPartial}),
            "accepted");
  EXPECT_EQ(rejection({.num_redundant_experts = 2, .replica_of = {0, 5}}), "accepted");
}

TEST(ParallelSpecFields, EachOutOfRange_IsNamed) {
  constexpr auto kCustom = PlacementStrategy::kCustom;
  expect_named({.ep_size = 0}, "ep_size");
  expect_named({.ep_size = 2, .ep_rank = 2}, "ep_rank");
  expect_named({.ep_size = 2, .ep_rank = -1}, "ep_rank");
  expect_named({.ep_size = std::numeric_limits<int32_t>::max()}, "ep_size");
  expect_named({.tp_size = 0}, "tp_size");
  expect_named({.tp_size = 2, .tp_rank = 2}, "tp_rank");
  expect_named({.tp_rank = -1}, "tp_rank");
  expect_named({.placement = static_cast<PlacementStrategy>(9)}, "placement");
  expect_named({.placement = kCustom}, "rank_of");
  expect_named({.rank_of = {0}}, "rank_of");
  expect_named({.placement = kCustom, .rank_of = {0, -1}}, "rank_of");
  expect_named({.placement = kCustom, .rank_of = {0, 1}}, "rank_of");
  expect_named({.placement = kCustom, .rank_of = {-2}, .reduce = Reduce::kPartial}, "rank_of");
  expect_named({.num_redundant_experts = -1}, "num_redundant_experts");
  expect_named({.num_redundant_experts = 1 << 24}, "num_redundant_experts");
  expect_named({.num_redundant_experts = 2, .replica_of = {0}}, "replica_of");
  expect_named({.replica_of = {0}}, "replica_of");
  expect_named({.reduce = static_cast<Reduce>(5)}, "reduce");
}

// Sizes and ranks for one device.
struct Split {
  int32_t tp_size, tp_rank, ep_size, ep_rank;
};
struct FlattenCase {
  std::string name;
  Groups groups;
  Split split;
  bool all_to_all;
};

// The worked examples of vLLM's FusedMoEParallelConfig.make, one row per device, and its newer
// forms with prefill context parallel and sequence parallel.
std::vector<FlattenCase> flatten_cases() {
  std::vector<FlattenCase> cases = {
      {"None", {}, {1, 0, 1, 0}, false},
      {"NoneEp", {.expert_parallel = true}, {1, 0, 1, 0}, false},
  };
  const auto add = [&](const std::string& name, const Groups& groups, const Split& split,
                       bool all_to_all) {
    cases.push_back({name + "Device" + std::to_string(cases.size()), groups, split, all_to_all});
  };
  for (int32_t r = 0; r < 2; ++r) {
    add("Tp2Dp1", {.tp_size = 2, .tp_rank = r}, {2, r, 1, 0}, false);
    add("Tp1Dp2", {.dp_size = 2, .dp_rank = r}, {2, r, 1, 0}, false);
    add("Tp2Dp1Ep", {.tp_size = 2, .tp_rank = r, .expert_parallel = true}, {1, 0, 2, r}, false);
    add("Tp1Dp2Ep", {.dp_size = 2, .dp_rank = r, .expert_parallel = true}, {1, 0, 2, r}, true);
    add("Pcp2", {.pcp_size = 2, .pcp_rank = r}, {2, r, 1, 0}, false);
    add("Pcp2Ep", {.pcp_size = 2, .pcp_rank = r, .expert_parallel = true}, {1, 0, 2, r}, true);
    add("Tp2Sp", {.tp_size = 2, .tp_rank = r, .sequence_parallel = true}, {2, r, 1, 0}, false);
    add("Tp2SpEp", {.tp_size = 2, .tp_rank = r, .expert_parallel = true, .sequence_parallel = true},
        {1, 0, 2, r}, true);
  }
  for (int32_t r = 0; r < 4; ++r) {
    const Groups groups{.tp_size = 2, .tp_rank = r % 2, .dp_size = 2, .dp_rank = r / 2};
    Groups ep = groups;
    ep.expert_parallel = true;
    add("Tp2Dp2", groups, {4, r, 1, 0}, false);
    add("Tp2Dp2Ep", ep, {1, 0, 4, r}, true);
  }
  for (int32_t r = 0; r < 12; ++r) {
    const Groups groups{.tp_size = 2,
                        .tp_rank = r % 2,
                        .pcp_size = 3,
                        .pcp_rank = r / 2 % 3,
                        .dp_size = 2,
                        .dp_rank = r / 6};
    Groups ep = groups;
    ep.expert_parallel = true;
    add("Tp2Pcp3Dp2", groups, {12, r, 1, 0}, false);
    add("Tp2Pcp3Dp2Ep", ep, {1, 0, 12, r}, true);
  }
  return cases;
}

class VllmMatrixFlatten : public ::testing::TestWithParam<FlattenCase> {};

TEST_P(VllmMatrixFlatten, EachDevice_GetsItsSplit) {
  const FlattenCase& c = GetParam();
  const ParallelSpec parallel = ParallelSpec::flatten(c.groups);
  EXPECT_NO_THROW(validate(parallel));
  EXPECT_EQ(parallel.tp_size, c.split.tp_size);
  EXPECT_EQ(parallel.tp_rank, c.split.tp_rank);
  EXPECT_EQ(parallel.ep_size, c.split.ep_size);
  EXPECT_EQ(parallel.ep_rank, c.split.ep_rank);
  EXPECT_EQ(needs_all_to_all(c.groups), c.all_to_all);
}

INSTANTIATE_TEST_SUITE_P(Examples, VllmMatrixFlatten, ::testing::ValuesIn(flatten_cases()),
                         [](const auto& row) { return row.param.name; });

TEST(Flatten, RanksOutsideTheirGroups_AreRefusedByName) {
  const auto message = [](const Groups& groups) {
    try {
      ParallelSpec::flatten(groups);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_NE(message({.tp_size = 2, .tp_rank = 2}).find("tp_rank"), std::string::npos);
  EXPECT_NE(message({.pcp_size = 2, .pcp_rank = -1}).find("pcp_rank"), std::string::npos);
  EXPECT_NE(message({.dp_size = 0}).find("dp_size"), std::string::npos);
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  EXPECT_NE(message({.tp_size = kMax, .pcp_size = kMax, .dp_size = kMax}).find("31 bits"),
            std::string::npos);
  EXPECT_NE(message({.tp_size = 2, .dp_size = kMax}).find("31 bits"), std::string::npos);
}

}  // namespace
}  // namespace conclave
