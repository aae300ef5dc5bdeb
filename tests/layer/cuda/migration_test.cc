// Experts that move between two GPUs while forwards go on: none waits, all ranks take the new
// places up at the same one, and no bit changes. What fails leaves the old places serving.
#include "cuda/check.h"
#include "cuda/stream.h"
#include "moving_ranks.h"

#include "conclave/balance.h"
#include "conclave/balancer.h"
#include "conclave/interop/cuda.h"
#include "conclave/refit.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::by_rank;
using testing::call_of;
using testing::code_of;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::experts_of_rank;
using testing::first_failure;
using testing::kMovingExperts;
using testing::MovingCase;
using testing::NcclTest;
using testing::on_nccl_ranks;
using testing::one_choice;
using testing::RankCall;
using testing::run_call;
using testing::run_nccl_ranks;
using testing::same_bits;
using testing::same_on_all;
using testing::second_communicator;
using testing::slots_with;
using testing::TokensOfRanks;
using Clock = std::chrono::steady_clock;

const LayerOptions kOptions{.max_tokens = 128, .spare_experts = 2};
// Fast, and still piece by piece.
constexpr double kShare = 1;
constexpr size_t kPiece = size_t{64} << 10;

class CudaMigration : public NcclTest {};

// Forwards of one layer, on one stream, with the same rows each time.
class Serving {
 public:
  Serving(DeviceLayer& owned, const MoeSpec& spec, int32_t rank, DType rows = DType::kBF16)
      : call_(call_of(spec, rank, 20 + 9 * rank, rows)),
        forward_(owned, call_.hidden.view(), DType::kF32) {
    forward_.route_by(call_.routing.ids, call_.routing.weights);
    forward_.enqueue();
    before_ = forward_.out();
  }
  // Whether its result has the bits of the first.
  bool forward() {
    forward_.enqueue();
    return same_bits(forward_.out(), before_);
  }
  // Nobody asks, as where graphs are captured and replayed.
  bool forward_of(const TokensOfRanks& tokens) {
    forward_.args.rank_tokens = tokens;
    const bool same = forward();
    forward_.args.rank_tokens = {};
    return same;
  }
  DeviceForward& args() { return forward_; }

 private:
  RankCall call_;
  DeviceForward forward_;
  Tensor before_;
};
constexpr TokensOfRanks kTokens = {20, 29};

bool on_one_epoch(Communicator& comm, const MoeLayer& layer) {
  const uint64_t epoch = layer.placement_epoch();
  return same_on_all(comm, std::as_bytes(std::span(&epoch, 1)));
}

TEST_F(CudaMigration, OfEveryFormat_GoesOnBesideForwards_AndKeepsTheirBits) {
  const ExpertSlots next = slots_with({1, 2, 9, 5});
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto second = second_communicator(rank, comm, 20s);
    for (const MovingCase& it : testing::moving_cases()) {
      SCOPED_TRACE(it.name);
      const auto owned = experts_of_rank(it.spec, rank, comm, kOptions);
      Serving serving(*owned, it.spec, rank, it.rows);
      Migration migration(
          owned->layer, next,
          {.communicator = second.get(), .processor_share = kShare, .piece_bytes = kPiece});
      // Ranks see the end at the same forward.
      for (int i = 0; i < 2000 && !migration.status().is_done; ++i) {
        EXPECT_TRUE(serving.forward());
        EXPECT_TRUE(on_one_epoch(comm, owned->layer));
        migration.check();
      }
      EXPECT_TRUE(migration.status().is_done);
      EXPECT_EQ(by_rank(owned->layer.slots()), by_rank(next));
      EXPECT_TRUE(serving.forward());
      comm.barrier("done");
    }
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

// Ranks that enqueue far ahead of their devices: places that a switch frees are read by what came
// before it, and are written after that only.
TEST_F(CudaMigration, BesideForwardsThatAreOnlyEnqueued_NoPlaceIsOverwrittenEarly) {
  MoeSpec spec = one_choice();
  const std::array walk = {slots_with({1, 2, 9, 5, 7}), slots_with({0, 3, 4, 6, 8}),
                           slots_with({9, 8, 7, 6, 5}), slots_with({0, 1, 2, 3, 4})};
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto second = second_communicator(rank, comm, 20s);
    const auto owned = experts_of_rank(spec, rank, comm, {.max_tokens = 128, .spare_experts = 1});
    Serving first(*owned, spec, rank);
    const RankCall call = call_of(spec, rank, 128, DType::kBF16, 77);
    const Tensor expected = run_call(*owned, call, DType::kF32);
    constexpr size_t kAhead = 40;
    std::vector<std::unique_ptr<DeviceForward>> ahead;
    for (size_t i = 0; i < kAhead; ++i) {
      ahead.push_back(std::make_unique<DeviceForward>(*owned, call.hidden.view(), DType::kF32));
      ahead.back()->route_by(call.routing.ids, call.routing.weights);
    }
    for (const ExpertSlots& slots : walk) {
      Migration migration(owned->layer, slots,
                          {.communicator = second.get(), .processor_share = kShare});
      for (int i = 0; i < 500 && !migration.status().is_done; ++i) {
        for (const auto& forward : ahead) forward->enqueue();
        for (const auto& forward : ahead) EXPECT_TRUE(same_bits(forward->out(), expected));
        migration.check();
      }
      migration.finish();
      EXPECT_EQ(by_rank(owned->layer.slots()), by_rank(slots));
    }
    comm.barrier("done");
  });
}

// They stay in the epoch that they find, and finish() takes the new one up between two of them.
TEST_F(CudaMigration, CallsThatAskNobody_AndGraphs_StayWhereTheyAre_UntilItIsFinished) {
  const MoeSpec spec = one_choice();
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto second = second_communicator(rank, comm, 20s);
    const auto owned = experts_of_rank(spec, rank, comm, kOptions);
    Serving serving(*owned, spec, rank);
    EXPECT_TRUE(serving.forward_of(kTokens));
    CUstream_st* const stream = to_cuda(owned->queue.stream());
    {
      serving.args().args.rank_tokens = kTokens;
      const cuda::OwnedGraph graph = cuda::capture(stream, [&] { serving.args().enqueue(); });
      serving.args().args.rank_tokens = {};
      const Tensor before = serving.args().out();
      const auto replay = [&] {
        owned->queue.fill(serving.args().args.out, 0xFF);
        cuda::check(cudaGraphLaunch(graph.get(), stream), "cudaGraphLaunch");
        return same_bits(serving.args().out(), before);
      };
      const ExpertSlots slots = slots_with({1, 2, 9, 5});
      {
        Migration migration(owned->layer, slots,
                            {.communicator = second.get(), .processor_share = kShare});
        // Ranks make as many calls.
        for (int i = 0; i < 200; ++i) {
          EXPECT_TRUE(replay());
          EXPECT_TRUE(serving.forward_of(kTokens));
          EXPECT_EQ(owned->layer.placement_epoch(), 0U);
        }
        comm.barrier("both have replayed");
        migration.finish();
        EXPECT_TRUE(migration.status().is_done);
        EXPECT_EQ(by_rank(owned->layer.slots()), by_rank(slots));
        EXPECT_TRUE(replay());
        EXPECT_TRUE(serving.forward_of(kTokens));
        EXPECT_TRUE(serving.forward());
      }
    }
    comm.check("done");
    comm.barrier("done");
  });
}

TEST_F(CudaMigration, ARankThatDiesMidway_IsATypedError_AndTheOldPlacesServe) {
  const MoeSpec spec = one_choice();
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    auto second = second_communicator(rank, comm, 5s);
    const auto owned = experts_of_rank(spec, rank, comm, kOptions);
    Serving serving(*owned, spec, rank);
    const ExpertSlots slots = slots_with({5, 6, 7, 8, 9});
    {
      // So slow that it cannot end by itself.
      std::optional<Migration> migration(
          std::in_place, owned->layer, slots,
          MigrationOptions{
              .communicator = second.get(), .processor_share = 0.001, .piece_bytes = 4096});
      for (int i = 0; i < 20; ++i) EXPECT_TRUE(serving.forward());
      if (rank == 1) {
        migration.reset();
        second.reset();
      } else {
        const auto until = Clock::now() + 12s;
        while (!migration->status().has_failed && Clock::now() < until) {
          std::this_thread::sleep_for(5ms);
        }
        const ErrorCode code = code_of([&] { migration->check(); });
        EXPECT_TRUE(code == ErrorCode::kCommPeerLost || code == ErrorCode::kCommAborted)
            << to_string(code);
      }
      for (int i = 0; i < 20; ++i) EXPECT_TRUE(serving.forward());
      EXPECT_EQ(owned->layer.placement_epoch(), 0U);
    }
    // Another one goes the whole way.
    const auto third = second_communicator(rank, comm, 20s);
    Migration again(owned->layer, slots, {.communicator = third.get(), .processor_share = kShare});
    again.finish();
    EXPECT_EQ(by_rank(owned->layer.slots()), by_rank(slots));
    EXPECT_TRUE(serving.forward());
    comm.barrier("done");
  });
}

// Rows are counted on the device; what was counted is the caller's to copy.
TEST_F(CudaMigration, ABalancer_SpreadsHotExperts_AndEveryForwardKeepsItsBits) {
  const MoeSpec spec = one_choice();
  constexpr int64_t kRows = 60;
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto second = second_communicator(rank, comm, 20s);
    const auto owned = experts_of_rank(spec, rank, comm, kOptions);
    RankCall call = call_of(spec, rank, kRows, DType::kBF16);
    for (int64_t token = 0; token < kRows; ++token) {
      call.routing.ids.as<int32_t>()[token] = static_cast<int32_t>(token % 4);
    }
    const Tensor expected = run_call(*owned, call, DType::kF32);
    Tensor counts(DType::kI64, {spec.num_experts});
    DeviceTensor load = owned->queue.allocate(DType::kI64, {spec.num_experts});
    DeviceForward forward(*owned, call.hidden.view(), DType::kF32);
    forward.route_by(call.routing.ids, call.routing.weights);
    forward.args.expert_load = {static_cast<int64_t*>(load.view().data),
                                static_cast<size_t>(spec.num_experts)};
    Balancer balancer(owned->context, {&owned->layer},
                      {.communicator = second.get(),
                       .window_size = 4,
                       .step_interval = 16,
                       .processor_share = kShare});
    std::vector<double> rows(static_cast<size_t>(spec.num_experts));
    // Ranks are in the same epoch after each forward, so that they make as many.
    int64_t steps_after = 0;
    for (int64_t step = 0; step < 2000 && steps_after < 100; ++step) {
      owned->queue.fill(load.view(), 0);
      forward.enqueue();
      EXPECT_TRUE(same_bits(forward.out(), expected)) << step;
      owned->queue.download(load.const_view(), counts.view());
      const std::span<int64_t> counted = balancer.load(0);
      for (size_t e = 0; e < counted.size(); ++e) {
        counted[e] += counts.as<int64_t>()[e];
        rows[e] += static_cast<double>(counts.as<int64_t>()[e]);
      }
      balancer.step();
      if (owned->layer.placement_epoch() > 0) ++steps_after;
    }
    EXPECT_GT(owned->layer.placement_epoch(), 0U);
    EXPECT_GT(balancedness(rows, owned->layer.slots()), 0.9);
    comm.barrier("done");
  });
}

TEST_F(CudaMigration, WhileItIsUnderWay_OtherChangesAreRefused) {
  const MoeSpec spec = one_choice();
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto second = second_communicator(rank, comm, 20s);
    const auto owned = experts_of_rank(spec, rank, comm, kOptions);
    Serving serving(*owned, spec, rank);
    {
      Migration migration(owned->layer, slots_with({1, 2, 9, 5}),
                          {.communicator = second.get(), .processor_share = kShare});
      EXPECT_EQ(code_of([&] { owned->layer.reload(*owned->source, ReloadMode::kInPlace); }),
                ErrorCode::kState);
      EXPECT_EQ(code_of([&] {
                  const Migration other(owned->layer, owned->layer.slots(),
                                        {.communicator = second.get()});
                }),
                ErrorCode::kState);
      EXPECT_EQ(code_of([&] { static_cast<void>(Refit::content_hash(owned->layer)); }),
                ErrorCode::kState);
      migration.finish();
    }
    EXPECT_TRUE(serving.forward());
    owned->layer.reload(*owned->source, ReloadMode::kInPlace);
    EXPECT_TRUE(serving.forward());
    comm.barrier("done");
  });
}

}  // namespace
}  // namespace conclave
