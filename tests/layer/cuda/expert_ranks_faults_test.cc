// Expert-parallel ranks on GPUs that disagree, are late or die: a typed error that names the other
// rank, in bounded time, and a device that goes on.
#include "expert_ranks.h"

#include "conclave/balance.h"
#include "conclave/migration.h"
#include "conclave/placement.h"

#include <gtest/gtest.h>

#include <cuda_runtime_api.h>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::call_of;
using testing::experts_of_rank;
using testing::make_spec;
using testing::NcclTest;
using testing::on_nccl_ranks;
using testing::RankCall;
using testing::run_call;
using testing::run_nccl_ranks;
using testing::TokensOfRanks;
using Clock = std::chrono::steady_clock;

MoeSpec spec_of() { return make_spec(10, 3, 264, 256, DType::kBF16); }

// Calls until it is known that one before had no result.
template <class Call>
void expect_later(const Call& call, ErrorCode code, int32_t peer) {
  const auto until = Clock::now() + 6s;
  while (Clock::now() < until) {
    try {
      call();
    } catch (const CommError& error) {
      EXPECT_EQ(to_string(error.code()), to_string(code)) << error.what();
      EXPECT_EQ(error.peer(), peer) << error.what();
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      return;
    }
    std::this_thread::sleep_for(20ms);
  }
  ADD_FAILURE() << "no error";
}

class CudaExpertRankFaults : public NcclTest {};

// Each rank is right about itself.
TEST_F(CudaExpertRankFaults, RanksWithOtherLists_LearnItAtALaterCall) {
  on_nccl_ranks(2s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec_of(), rank, comm);
    const TokensOfRanks tokens = rank == 0 ? TokensOfRanks{5, 7} : TokensOfRanks{5, 9};
    const RankCall call = call_of(spec_of(), rank, tokens[static_cast<size_t>(rank)], DType::kBF16);
    const auto forward = [&] { static_cast<void>(run_call(*owned, call, DType::kF32, tokens)); };
    expect_later(forward, ErrorCode::kCommMismatch, 1 - rank);
  });
}

TEST_F(CudaExpertRankFaults, RanksWhoseRowsAreOfOtherTypes_LearnItAtALaterCall) {
  MoeSpec spec = make_spec(10, 3, 256, 256, DType::kF8E4M3);
  spec.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  spec.weight_on = WeightOn::kInput;
  on_nccl_ranks(2s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm);
    const RankCall call = call_of(spec, rank, 9, rank == 0 ? DType::kBF16 : DType::kF16);
    const auto forward = [&] {
      static_cast<void>(run_call(*owned, call, DType::kF32, TokensOfRanks{9, 9}));
    };
    expect_later(forward, ErrorCode::kCommMismatch, 1 - rank);
  });
}

TEST_F(CudaExpertRankFaults, ALateRank_IsATimeoutOnBoth) {
  on_nccl_ranks(1s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec_of(), rank, comm);
    const RankCall call = call_of(spec_of(), rank, 9, DType::kBF16);
    const auto forward = [&] {
      static_cast<void>(run_call(*owned, call, DType::kF32, TokensOfRanks{9, 9}));
    };
    forward();
    if (rank == 1) std::this_thread::sleep_for(3s);
    expect_later(forward, ErrorCode::kCommTimeout, 1);
  });
}

// Ranks that ask wait for each other before anything is enqueued.
TEST_F(CudaExpertRankFaults, ALateRankThatIsAsked_EndsTheCallOfTheOther) {
  on_nccl_ranks(1s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec_of(), rank, comm);
    const RankCall call = call_of(spec_of(), rank, 9, DType::kBF16);
    if (rank == 1) std::this_thread::sleep_for(3s);
    const auto begin = Clock::now();
    try {
      static_cast<void>(run_call(*owned, call, DType::kF32));
      ADD_FAILURE() << "accepted";
    } catch (const CommError& error) {
      EXPECT_EQ(to_string(error.code()), to_string(ErrorCode::kCommTimeout)) << error.what();
      EXPECT_EQ(error.peer(), 1);
    }
    EXPECT_LT(Clock::now() - begin, 3s);
  });
}

TEST_F(CudaExpertRankFaults, ARankThatDies_IsNamed) {
  for (const bool asks : {false, true}) {
    on_nccl_ranks(5s, [&](int32_t rank, Communicator& comm) {
      const auto owned = experts_of_rank(spec_of(), rank, comm);
      const RankCall call = call_of(spec_of(), rank, 9, DType::kBF16);
      const auto forward = [&] {
        if (asks) return static_cast<void>(run_call(*owned, call, DType::kF32));
        static_cast<void>(run_call(*owned, call, DType::kF32, TokensOfRanks{9, 9}));
      };
      forward();
      if (rank == 1) return;
      expect_later(forward, ErrorCode::kCommPeerLost, 1);
    });
  }
}

// Without spare places experts cannot move beside forwards where they would change sides.
TEST_F(CudaExpertRankFaults, ExpertsThatCannotMove_AreRefused) {
  on_nccl_ranks(10s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec_of(), rank, comm);
    ParallelSpec next = owned->layer.parallel();
    next.placement = PlacementStrategy::kRoundRobin;
    const auto refused = [&](const auto& call) {
      EXPECT_EQ(to_string(testing::code_of(call)), to_string(ErrorCode::kUnsupported));
    };
    const ExpertSlots turned = slots_of(spec_of().num_experts, next);
    refused([&] { Migration(owned->layer, turned, {.communicator = &comm}); });
    comm.barrier("done");
  });
}

// A list must be one of this layer's ranks, and right about this one: nothing is sent then.
TEST_F(CudaExpertRankFaults, ListsThatCannotBe_AreRefused) {
  on_nccl_ranks(5s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec_of(), rank, comm);
    const RankCall call = call_of(spec_of(), rank, 9, DType::kBF16);
    testing::DeviceForward forward(*owned, call.hidden.view(), DType::kF32);
    forward.route_by(call.routing.ids, call.routing.weights);
    const auto refusal = [&](std::vector<int64_t> tokens) {
      forward.args.rank_tokens = tokens;
      return testing::code_of([&] { forward.enqueue(); });
    };
    EXPECT_EQ(refusal({9}), ErrorCode::kShape);
    EXPECT_EQ(refusal({9, 9, 9}), ErrorCode::kShape);
    EXPECT_EQ(refusal({8, 8}), ErrorCode::kInvalidArgument);
    EXPECT_EQ(rank == 0 ? refusal({9, -1}) : refusal({-1, 9}), ErrorCode::kInvalidArgument);
    EXPECT_EQ(refusal({9, 9}), ErrorCode{0});
    owned->queue.synchronize();
    comm.barrier("done");
  });
}

TEST_F(CudaExpertRankFaults, LayersThatDiffer_AreNotCreated) {
  const auto outcomes = run_nccl_ranks(10s, [&](int32_t rank, Communicator& comm) {
    MoeSpec spec = spec_of();
    spec.output_scale = rank == 0 ? 1 : 2;
    static_cast<void>(experts_of_rank(spec, rank, comm));
  });
  for (const testing::RankOutcome& outcome : outcomes) {
    ASSERT_TRUE(outcome.code.has_value());
    EXPECT_EQ(*outcome.code, ErrorCode::kCommMismatch) << outcome.message;
    EXPECT_NE(outcome.message.find("output_scale"), std::string::npos) << outcome.message;
  }
}

}  // namespace
}  // namespace conclave
