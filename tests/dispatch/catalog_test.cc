#include "dispatch/ep_problem.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace conclave {
namespace {

using dispatch::dispatcher_catalog;
using dispatch::DispatchProblem;
using testing::EpCase;

std::string reason(std::string_view row, const DispatchProblem& problem) {
  return dispatcher_catalog().find(row, "dispatcher").supports(problem).reason();
}

TEST(DispatcherCatalog, EveryRow_SupportsAProblemAndMakesIt) {
  const auto group = make_local_group({.num_ranks = 1});
  for (const auto& row : dispatcher_catalog().rows()) {
    SCOPED_TRACE(std::string(row.name));
    EpCase c;
    if (row.name == "ep.fixed_slots") c.transport = EpTransport::kFixedSlots;
    const DispatchProblem problem = testing::problem_of(c, 0, group[0].get());
    ASSERT_TRUE(row.supports(problem)) << row.supports(problem).reason();
    const auto dispatcher = row.make(problem);
    EXPECT_EQ(dispatcher->num_local_experts(), c.experts);
    EXPECT_GT(dispatcher->workspace_bytes(), 0U);
  }
}

TEST(DispatcherCatalog, Rejections_SayWhy) {
  const auto group = make_local_group({.num_ranks = 2});
  const EpCase two{.ranks = 2};
  const DispatchProblem good = testing::problem_of(two, 1, group[1].get());
  EXPECT_EQ(reason("ep.variable", good), "");
  EXPECT_NE(reason("local", good).find("2 ranks"), std::string::npos);
  EXPECT_NE(reason("ep.fixed_slots", good).find("variable-size"), std::string::npos);

  DispatchProblem slots = good;
  slots.transport = EpTransport::kFixedSlots;
  EXPECT_NE(reason("ep.variable", slots).find("fixed-slot"), std::string::npos);

  DispatchProblem alone = good;
  alone.communicator = nullptr;
  EXPECT_NE(reason("ep.variable", alone).find("no communicator"), std::string::npos);
  EXPECT_THROW(dispatcher_catalog().find("ep.variable", "dispatcher").make(alone), Error);

  DispatchProblem rounded = good;
  rounded.combine = EpCombine::kRoundedPerRank;
  EXPECT_NE(reason("ep.variable", rounded).find("between GPUs only"), std::string::npos);

  const DispatchProblem swapped = testing::problem_of(two, 0, group[1].get());
  EXPECT_NE(reason("ep.variable", swapped).find("rank 1 of 2"), std::string::npos);

  DispatchProblem outside = good;
  outside.ep_rank = 2;
  EXPECT_NE(reason("ep.variable", outside).find("ep_rank 2"), std::string::npos);
}

TEST(DispatcherCatalog, SlotBounds_FollowTheLayout) {
  const auto group = make_local_group({.num_ranks = 4});
  // 10 experts on 4 ranks are split 3, 3, 2, 2.
  const auto slots = [&](EpTransport transport, int32_t rank, int64_t top_k) {
    const EpCase c{
        .ranks = 4, .experts = 10, .top_k = top_k, .max_tokens = 16, .transport = transport};
    return testing::make_dispatcher(c, rank, *group[static_cast<size_t>(rank)])->max_slots();
  };
  EXPECT_EQ(slots(EpTransport::kVariable, 0, 2), 16 * 2 * 4);
  EXPECT_EQ(slots(EpTransport::kVariable, 0, 8), 16 * 3 * 4);
  EXPECT_EQ(slots(EpTransport::kVariable, 3, 8), 16 * 2 * 4);
  EXPECT_EQ(slots(EpTransport::kFixedSlots, 0, 2), 16 * 4 * 3);
  EXPECT_EQ(slots(EpTransport::kFixedSlots, 3, 2), 16 * 4 * 2);
}

// Each size of a plan is the first that does not fit for some number of tokens.
TEST(DispatcherCatalog, SizesBeyond63Bits_AreRefused) {
  const auto group = make_local_group({.num_ranks = 2});
  EpCase c{.ranks = 2, .experts = 64, .top_k = 32};
  for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    c.transport = transport;
    for (int power = 52; power < 63; ++power) {
      c.max_tokens = int64_t{1} << power;
      try {
        testing::make_dispatcher(c, 0, *group[0]);
        ADD_FAILURE() << "planned for 2^" << power << " tokens";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kSizeOverflow) << error.what();
      }
    }
  }
}

}  // namespace
}  // namespace conclave
