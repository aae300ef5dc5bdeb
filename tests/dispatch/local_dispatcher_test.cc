#include "dispatch/local_dispatcher.h"

#include "dispatch/dispatch_problem.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace conclave {
namespace {

using dispatch::DispatchProblem;
using dispatch::make_local_dispatcher;
using testing::TokenInput;

DispatchProblem problem_of(int64_t max_tokens, int64_t top_k, int64_t experts, int64_t hidden) {
  return {.max_tokens = max_tokens,
          .top_k = top_k,
          .num_experts = experts,
          .hidden_size = hidden,
          .row_bytes = testing::float_row_bytes(hidden)};
}

std::vector<float> run(const DispatchProblem& problem, const TokenInput& input) {
  const auto dispatcher = make_local_dispatcher(problem);
  testing::PoisonedWorkspace workspace(dispatcher->workspace_bytes());
  testing::SerialExecutor executor;
  return testing::run_layer(*dispatcher, input, problem.top_k, problem.hidden_size,
                            testing::first_ids(problem.num_experts), workspace.span(), executor);
}

TEST(LocalDispatcher, AnyShape_EqualsThePlainLayer) {
  uint32_t seed = 1;
  for (const int64_t tokens : {0, 1, 33}) {
    for (const int64_t experts : {1, 2, 5, 16}) {
      for (const int64_t top_k : {1, 2, 5, 16}) {
        if (top_k > experts) continue;
        SCOPED_TRACE("tokens " + std::to_string(tokens) + ", experts " + std::to_string(experts) +
                     ", top_k " + std::to_string(top_k));
        const TokenInput input = testing::random_input(tokens, top_k, experts, 20, seed++);
        EXPECT_EQ(run(problem_of(33, top_k, experts, 20), input),
                  testing::plain_layer(input, top_k, experts, 20));
      }
    }
  }
}

TEST(LocalDispatcher, HostileIds_ContributeNothing) {
  const DispatchProblem problem = problem_of(4, 2, 4, 16);
  TokenInput input = testing::random_input(4, 2, 4, 16, 3);
  input.ids = {
      -2, 4, 5, 1 << 15, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max(),
      3,  -1};
  EXPECT_EQ(run(problem, input), testing::plain_layer(input, 2, 4, 16));
}

TEST(LocalDispatcher, RepeatedIds_AddAndNeverExceedTheSlotBound) {
  const DispatchProblem problem = problem_of(8, 4, 4, 16);
  TokenInput input = testing::random_input(8, 4, 4, 16, 5);
  std::fill(input.ids.begin(), input.ids.end(), 2);
  EXPECT_EQ(run(problem, input), testing::plain_layer(input, 4, 4, 16));
}

TEST(LocalDispatcher, Batch_ReadsTheCallersRowsInPlace) {
  const DispatchProblem problem = problem_of(3, 2, 4, 16);
  const TokenInput input = testing::random_input(3, 2, 4, 16, 7);
  const auto dispatcher = make_local_dispatcher(problem);
  testing::PoisonedWorkspace workspace(dispatcher->workspace_bytes());
  testing::SerialExecutor executor;
  const auto rows = testing::bundle_rows(input, 16);
  const auto* data = reinterpret_cast<const std::byte*>(rows.data());
  const ExpertBatch batch =
      dispatcher->dispatch({3, 2, input.ids.data(), input.weights.data()},
                           {data, 3, 64, DType::kF32}, workspace.span(), executor);
  EXPECT_EQ(batch.bundle.rows, data);
  EXPECT_EQ(batch.layout, BatchLayout::kContiguous);
  EXPECT_LE(batch.num_slots, dispatcher->max_slots());
}

TEST(LocalDispatcher, SlotBound_IsTokensTimesTheSmallerOfTopKAndExperts) {
  EXPECT_EQ(make_local_dispatcher(problem_of(10, 3, 8, 16))->max_slots(), 30);
  EXPECT_EQ(make_local_dispatcher(problem_of(10, 8, 8, 16))->max_slots(), 80);
}

TEST(LocalDispatcher, WorkspaceBound_IsTightAndChecked) {
  const DispatchProblem problem = problem_of(5, 2, 8, 16);
  const TokenInput input = testing::random_input(5, 2, 8, 16, 9);
  const auto dispatcher = make_local_dispatcher(problem);
  testing::PoisonedWorkspace workspace(dispatcher->workspace_bytes());
  testing::SerialExecutor executor;
  for (const size_t bytes :
       {dispatcher->workspace_bytes() - 1, dispatcher->workspace_bytes() / 2}) {
    try {
      testing::run_layer(*dispatcher, input, 2, 16, testing::first_ids(8),
                         workspace.span().first(bytes), executor);
      ADD_FAILURE() << "ran with " << bytes << " bytes";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kWorkspaceTooSmall);
    }
  }
}

TEST(LocalDispatcher, ReducedOutput_OnlyRoundsAndAddsShared) {
  const DispatchProblem problem = problem_of(2, 2, 4, 16);
  const auto dispatcher = make_local_dispatcher(problem);
  testing::PoisonedWorkspace workspace(dispatcher->workspace_bytes());
  testing::SerialExecutor executor;
  std::vector<float> reduced(32, 1.25F);
  std::vector<float> shared(32, 0.5F);
  std::vector<float> out(32);
  const std::vector<int32_t> ids(4, 0);
  const std::vector<float> weights(4, 9.0F);
  dispatcher->combine({.output = {OutputTag::kReducedPerToken, reduced.data(), 16},
                       .routing = {2, 2, ids.data(), weights.data()},
                       .finish = {.shared = shared.data(), .shared_stride = 16},
                       .out = {out.data(), DType::kF32, Shape{2, 16}, 0}},
                      workspace.span(), executor);
  EXPECT_EQ(out, std::vector<float>(32, 1.75F));
}

TEST(LocalDispatcher, ArgumentsOutsideThePlan_AreRefused) {
  const DispatchProblem problem = problem_of(4, 2, 4, 16);
  const auto dispatcher = make_local_dispatcher(problem);
  testing::PoisonedWorkspace workspace(dispatcher->workspace_bytes());
  testing::SerialExecutor executor;
  const TokenInput input = testing::random_input(8, 4, 4, 16, 11);
  const auto rows = testing::bundle_rows(input, 16);
  const auto code_of = [&](Routing routing, RowBundle bundle) {
    try {
      routing.topk_ids = input.ids.data();
      routing.topk_weights = input.weights.data();
      bundle.rows = reinterpret_cast<const std::byte*>(rows.data());
      dispatcher->dispatch(routing, bundle, workspace.span(), executor);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  };
  EXPECT_EQ(code_of({.num_tokens = 5, .top_k = 2}, {nullptr, 5, 64, DType::kF32}),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of({.num_tokens = 4, .top_k = 3}, {nullptr, 4, 64, DType::kF32}),
            ErrorCode::kShape);
  EXPECT_EQ(code_of({.num_tokens = 4, .top_k = 2}, {nullptr, 3, 64, DType::kF32}),
            ErrorCode::kShape);
  EXPECT_EQ(code_of({.num_tokens = 4, .top_k = 2}, {nullptr, 4, 128, DType::kF32}),
            ErrorCode::kShape);
  EXPECT_EQ(code_of({.num_tokens = 4, .top_k = 2}, {nullptr, 4, 64, DType::kBF16}),
            ErrorCode::kDType);
}

TEST(LocalDispatcher, ImpossiblePlans_AreRefusedWithAReason) {
  const auto reason = [](DispatchProblem problem) {
    return dispatch::local_supports(problem).reason();
  };
  EXPECT_NE(reason(problem_of(0, 2, 4, 16)).find("max_tokens"), std::string::npos);
  EXPECT_NE(reason(problem_of(4, 0, 4, 16)).find("top_k"), std::string::npos);
  DispatchProblem spread = problem_of(4, 2, 4, 16);
  spread.ep_size = 2;
  EXPECT_NE(reason(spread).find("2 ranks"), std::string::npos);
  DispatchProblem crooked = problem_of(4, 2, 4, 16);
  crooked.row_bytes = 60;
  EXPECT_NE(reason(crooked).find("multiple of 64"), std::string::npos);
  EXPECT_THROW(make_local_dispatcher(crooked), Error);
  EXPECT_THROW(make_local_dispatcher(problem_of(int64_t{1} << 60, 16, 16, 16)), Error);
}

}  // namespace
}  // namespace conclave
