// Expert-parallel ranks on GPUs that are left after a loss: they take their layer to each other,
// with replicas or with experts read again, and serve on.
#include "expert_ranks.h"

#include "conclave/balance.h"
#include "conclave/placement.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::call_of;
using testing::DeviceLayer;
using testing::experts_of_rank;
using testing::kNcclRanks;
using testing::make_spec;
using testing::NcclTest;
using testing::on_nccl_ranks;
using testing::RankCall;
using testing::run_call;
using testing::TokensOfRanks;
using Clock = std::chrono::steady_clock;

constexpr double kBar = 6e-3;

struct LayerCase {
  std::string name;
  MoeSpec spec;
};

std::vector<LayerCase> layer_cases() {
  const MoeSpec plain = make_spec(10, 3, 256, 256, DType::kBF16);
  MoeSpec full = plain;
  full.has_bias = true;
  full.has_output_bias = true;
  full.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 256, .has_bias = true};
  full.residual = {.intermediate_size = 128};
  MoeSpec e4m3 = plain;
  e4m3.weight_dtype = DType::kF8E4M3;
  e4m3.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  MoeSpec int4 = plain;
  int4.weight_dtype = DType::kI4;
  int4.quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32};
  return {{"bf16", plain}, {"all parts", full}, {"e4m3 in blocks", e4m3}, {"int4", int4}};
}

// Every expert on both ranks.
ParallelSpec every_expert_twice(const MoeSpec& spec, int32_t rank) {
  const std::vector<double> load(static_cast<size_t>(spec.num_experts), 1.0);
  return with_slots(
      {.ep_size = kNcclRanks, .ep_rank = rank},
      balance_experts(load, {.rule = "surviving",
                             .num_ranks = kNcclRanks,
                             .num_redundant_experts = static_cast<int32_t>(spec.num_experts)}));
}

// Until the loss is known; then the ranks that are left.
Survivors after_loss(Communicator& comm, const std::function<void()>& forward) {
  const auto until = Clock::now() + 6s;
  try {
    while (Clock::now() < until) {
      forward();
      std::this_thread::sleep_for(20ms);
    }
  } catch (const CommError& error) {
    EXPECT_EQ(to_string(error.code()), to_string(ErrorCode::kCommPeerLost)) << error.what();
    EXPECT_EQ(error.peer(), 1) << error.what();
    return survivors(comm, {.deadline = 5s});
  }
  throw Error(ErrorCode::kInternal, {.what = "no error"});
}

Tensor run_on(const MoeLayer& layer, const Context& context, DeviceLayer& like,
              const RankCall& call) {
  testing::DeviceForward forward(like, call.hidden.view(), DType::kF32);
  forward.route_by(call.routing.ids, call.routing.weights);
  Workspace workspace(context, layer.workspace_bytes());
  forward.args.workspace = &workspace;
  layer.forward(forward.args);
  like.queue.synchronize();
  return forward.out();
}

class CudaExpertSurvivors : public NcclTest {};

TEST_F(CudaExpertSurvivors, TheLastRank_ServesOnWithReplicasAndWithExpertsReadAgain) {
  for (const LayerCase& it : layer_cases()) {
    for (const bool has_replicas : {true, false}) {
      SCOPED_TRACE(it.name + (has_replicas ? ", replicas" : ", read again"));
      on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
        const ParallelSpec split =
            has_replicas ? every_expert_twice(it.spec, rank) : ParallelSpec{};
        const auto owned = experts_of_rank(it.spec, rank, comm, {.max_tokens = 128}, split);
        const RankCall call = call_of(it.spec, rank, 9, DType::kBF16);
        const auto forward = [&] {
          static_cast<void>(run_call(*owned, call, DType::kF32, TokensOfRanks{9, 9}));
        };
        forward();
        if (rank == 1) return;
        const Survivors left = after_loss(comm, forward);
        ASSERT_EQ(left.old_ranks, std::vector<int32_t>{0});
        const Context fewer({.device = owned->context.device(),
                             .num_threads = 2,
                             .communicator = left.communicator.get()});
        const ParallelSpec next =
            without_ranks(it.spec.num_experts, owned->layer.parallel(), left.old_ranks, 0);
        if (!has_replicas) {
          EXPECT_EQ(testing::code_of([&] { owned->layer.on_ranks(fewer, next, nullptr); }),
                    ErrorCode::kTensorMissing);
        }
        const MoeLayer layer =
            owned->layer.on_ranks(fewer, next, has_replicas ? nullptr : owned->source.get());
        const Tensor out = run_on(layer, fewer, *owned, call);
        EXPECT_LE(testing::worst_error(*owned, call.hidden, call.routing, out), kBar);
      });
    }
  }
}

// A group that shrinks without a loss, and a layer that both ranks take along.
TEST_F(CudaExpertSurvivors, RanksThatAreAllLeft_KeepTheirExpertsWithoutASource) {
  for (const LayerCase& it : layer_cases()) {
    SCOPED_TRACE(it.name);
    on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
      const auto owned = experts_of_rank(it.spec, rank, comm);
      const RankCall call = call_of(it.spec, rank, 9, DType::kBF16);
      const Tensor before = run_call(*owned, call, DType::kF32);
      comm.barrier("both have it");
      const Survivors left = survivors(comm);
      ASSERT_EQ(left.old_ranks, (std::vector<int32_t>{0, 1}));
      const Context next({.device = owned->context.device(),
                          .num_threads = 2,
                          .communicator = left.communicator.get()});
      const MoeLayer layer = owned->layer.on_ranks(next, owned->layer.parallel());
      const Tensor after = run_on(layer, next, *owned, call);
      EXPECT_TRUE(testing::same_bits(before, after));
      left.communicator->barrier("both have it again");
    });
  }
}

}  // namespace
}  // namespace conclave
