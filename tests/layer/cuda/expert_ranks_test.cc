// Expert-parallel layers on two GPUs whose rows meet at the experts over NCCL: each rank's own rows
// are within the bar of float64, with the same bits every time and in a graph.
#include "expert_ranks.h"

#include "cuda/check.h"
#include "cuda/stream.h"

#include "conclave/interop/cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;
using testing::call_of;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::expert_ranks_spec;
using testing::experts_of_rank;
using testing::first_failure;
using testing::GivenRouting;
using testing::kNcclRanks;
using testing::NcclTest;
using testing::NumberForm;
using testing::random_tensor;
using testing::RankCall;
using testing::run_call;
using testing::run_nccl_ranks;
using testing::same_bits;
using testing::TokensOfRanks;

constexpr double kBar = 6e-3;

struct Case {
  std::string name;
  MoeSpec spec;
  DType rows = DType::kBF16;
  ParallelSpec parallel = {};
  EpCombine combine = EpCombine::kUnreduced;
};

std::vector<Case> cases_of_parts() {
  std::vector<Case> all;
  MoeSpec full = expert_ranks_spec();
  full.has_bias = true;
  full.has_output_bias = true;
  full.output_scale = 2.5;
  full.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 192, .has_bias = true};
  full.residual = {.intermediate_size = 128};
  all.push_back({"biases, shared experts, a residual MLP", full});
  MoeSpec as_wide = expert_ranks_spec(DType::kF16);
  as_wide.shared = {.mode = SharedMode::kAdd, .intermediate_size = 256};
  all.push_back({"f16, shared experts as wide as others", as_wide, DType::kF16});
  MoeSpec zero = expert_ranks_spec();
  zero.num_zero_experts = 2;
  all.push_back({"zero experts", zero});
  MoeSpec latent = expert_ranks_spec();
  latent.latent = {.size = 128, .has_norm = true};
  all.push_back({"a latent layer with a norm", latent});
  MoeSpec narrow = expert_ranks_spec();
  narrow.latent = {.size = 130};
  all.push_back({"a latent layer of 130 columns", narrow});
  MoeSpec weighs = expert_ranks_spec();
  weighs.weight_on = WeightOn::kInput;
  all.push_back({"weights on the input", weighs});
  all.push_back(
      {"redundant experts", expert_ranks_spec(), DType::kBF16, {.num_redundant_experts = 3}});
  all.push_back({"experts in turn",
                 expert_ranks_spec(),
                 DType::kBF16,
                 {.placement = PlacementStrategy::kRoundRobin}});
  MoeSpec odd = expert_ranks_spec();
  odd.num_experts = 7;
  all.push_back({"4 and 3 experts", odd, DType::kF32});
  Case rounded{"sums in 16 bits", expert_ranks_spec()};
  rounded.combine = EpCombine::kRoundedPerRank;
  all.push_back(rounded);
  rounded = {"sums of f16 in 16 bits", as_wide, DType::kF16};
  rounded.combine = EpCombine::kRoundedPerRank;
  all.push_back(rounded);
  rounded = {"latent sums of 130 columns in 16 bits", narrow};
  rounded.combine = EpCombine::kRoundedPerRank;
  all.push_back(rounded);
  MoeSpec few = expert_ranks_spec();
  few.num_experts = 1;
  few.top_k = 1;
  all.push_back({"a rank without experts", few});
  return all;
}

std::vector<Case> cases_of_formats() {
  std::vector<Case> all;
  for (const NumberForm& form : testing::number_forms()) {
    all.push_back({form.name, testing::with_form(expert_ranks_spec(DType::kBF16, {}, 256), form),
                   testing::row_dtype(form)});
  }
  all.push_back({"f32", expert_ranks_spec(DType::kF32), DType::kF32});
  all.push_back(
      {"int4 in groups",
       expert_ranks_spec(
           DType::kI4, {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32}, 256)});
  // What one rank would make of such rows must be made of them where they arrive.
  const Case codes = all[2];
  all.push_back({"e4m3 in blocks, rows of f32", codes.spec, DType::kF32});
  all.push_back({"e4m3 in blocks, rows of f16", codes.spec, DType::kF16});
  Case weighed = codes;
  weighed.name = "e4m3 in blocks, weights on the input";
  weighed.spec.weight_on = WeightOn::kInput;
  all.push_back(weighed);
  return all;
}

// Chunks of the first take turns with empty ones of the other.
constexpr std::array<TokensOfRanks, 6> kTokens = {
    {{0, 0}, {0, 7}, {1, 1}, {65, 0}, {130, 30}, {20, 300}}};

class CudaExpertRanks : public NcclTest {};
class CudaExpertRankCases : public NcclTest, public ::testing::WithParamInterface<Case> {};

TEST_P(CudaExpertRankCases, EveryRanksRows_AreWithinTheBar) {
  const Case& it = GetParam();
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(it.spec, rank, comm,
                                       {.max_tokens = 128, .ep_combine = it.combine}, it.parallel);
    EXPECT_EQ(owned->layer.plan().dispatcher, "cuda.gather");
    for (const TokensOfRanks& tokens : kTokens) {
      const int64_t own = tokens[static_cast<size_t>(rank)];
      const RankCall call = call_of(it.spec, rank, own, it.rows);
      for (const DType type : {it.rows, DType::kF32}) {
        const Tensor out = run_call(*owned, call, type);
        EXPECT_TRUE(same_bits(out, run_call(*owned, call, type, tokens))) << own;
        if (own == 0) continue;
        EXPECT_LE(testing::worst_error(*owned, call.hidden, call.routing, out), kBar) << own;
      }
    }
    comm.check("done");
    comm.barrier("done");
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  std::string name = info.param.name;
  std::ranges::replace_if(
      name, [](char letter) { return std::isalnum(static_cast<unsigned char>(letter)) == 0; }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Parts, CudaExpertRankCases, ::testing::ValuesIn(cases_of_parts()),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Formats, CudaExpertRankCases, ::testing::ValuesIn(cases_of_formats()),
                         name_of);

TEST_F(CudaExpertRanks, OneHotExpert_AndARankWithNothingToDo_AreNoOtherCase) {
  const MoeSpec spec = expert_ranks_spec();
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm);
    for (const int32_t first : {0, 9}) {
      RankCall call = call_of(spec, rank, 70, DType::kBF16);
      const std::span<int32_t> ids(call.routing.ids.as<int32_t>(), 70 * 3);
      std::ranges::fill(ids, first);
      const Tensor out = run_call(*owned, call, DType::kF32);
      EXPECT_LE(testing::worst_error(*owned, call.hidden, call.routing, out), kBar) << first;
    }
    comm.barrier("done");
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

TEST_F(CudaExpertRanks, AThousandCalls_HaveTheSameBits) {
  const MoeSpec spec = expert_ranks_spec();
  const TokensOfRanks tokens = {33, 65};
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm);
    const RankCall call = call_of(spec, rank, tokens[static_cast<size_t>(rank)], DType::kBF16);
    const Tensor first = run_call(*owned, call, DType::kF32, tokens);
    DeviceForward forward(*owned, call.hidden.view(), DType::kF32);
    forward.route_by(call.routing.ids, call.routing.weights);
    forward.args.rank_tokens = tokens;
    int64_t others = 0;
    for (int round = 0; round < 1000; ++round) {
      forward.enqueue();
      if (!same_bits(first, forward.out())) ++others;
    }
    EXPECT_EQ(others, 0);
    comm.check("done");
    comm.barrier("done");
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

TEST_F(CudaExpertRanks, AGraphOfAForward_HasTheBitsOfTheForward) {
  MoeSpec spec = expert_ranks_spec();
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 192};
  const std::array<TokensOfRanks, 3> sizes = {{{3, 3}, {100, 1}, {0, 40}}};
  for (const TokensOfRanks& tokens : sizes) {
    const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
      const auto owned = experts_of_rank(spec, rank, comm);
      const int64_t own = tokens[static_cast<size_t>(rank)];
      RankCall call = call_of(spec, rank, own, DType::kBF16);
      // The first call of a layer may load kernels.
      static_cast<void>(run_call(*owned, call, DType::kF32));
      DeviceForward forward(*owned, call.hidden.view(), DType::kF32);
      forward.route_by(call.routing.ids, call.routing.weights);
      forward.args.rank_tokens = tokens;
      CUstream_st* const stream = to_cuda(owned->queue.stream());
      {
        const cuda::OwnedGraph graph = cuda::capture(stream, [&] { forward.enqueue(); });
        for (uint64_t round = 0; round < 5; ++round) {
          call.hidden = random_tensor(DType::kBF16, own, spec.hidden_size, 20 + round);
          if (own > 0) owned->queue.upload(call.hidden.const_view(), forward.hidden().view());
          cuda::check(cudaGraphLaunch(graph.get(), stream), "cudaGraphLaunch");
          owned->queue.synchronize();
          const Tensor replayed = forward.out();
          EXPECT_TRUE(same_bits(replayed, run_call(*owned, call, DType::kF32))) << round;
        }
      }
      comm.check("done");
      comm.barrier("done");
    });
    EXPECT_EQ(first_failure(outcomes), "");
  }
}

// Exchanges of a communicator follow each other whatever the stream, also within a graph.
TEST_F(CudaExpertRanks, ForwardsOnTwoStreams_TakeTurns) {
  const MoeSpec spec = expert_ranks_spec();
  constexpr int64_t kRows = 90;
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm);
    const RankCall call = call_of(spec, rank, kRows, DType::kBF16);
    const Tensor expected = run_call(*owned, call, DType::kF32);
    Workspace second(owned->context, owned->layer.workspace_bytes());
    const cuda::OwnedStream other = cuda::make_stream();
    DeviceForward here(*owned, call.hidden.view(), DType::kF32);
    DeviceForward there(*owned, call.hidden.view(), DType::kF32);
    for (DeviceForward* forward : {&here, &there}) {
      forward->route_by(call.routing.ids, call.routing.weights);
    }
    there.args.stream = to_stream(other.get());
    there.args.workspace = &second;
    owned->queue.synchronize();
    CUstream_st* const stream = to_cuda(owned->queue.stream());
    const auto enqueue = [&] {
      for (DeviceForward* forward : {&here, &here, &there, &here, &there, &there}) {
        forward->enqueue();
      }
    };
    const cuda::OwnedEvent fork = cuda::make_event();
    const cuda::OwnedEvent join = cuda::make_event();
    const cuda::OwnedGraph graph = cuda::capture(stream, [&] {
      cuda::join(stream, other.get(), fork.get());
      enqueue();
      cuda::join(other.get(), stream, join.get());
    });
    for (int round = 0; round < 20; ++round) {
      if (round % 2 == 0) {
        enqueue();
      } else {
        cuda::check(cudaGraphLaunch(graph.get(), stream), "cudaGraphLaunch");
      }
      cuda::check(cudaStreamSynchronize(other.get()), "cudaStreamSynchronize");
      EXPECT_TRUE(same_bits(here.out(), expected)) << round;
      EXPECT_TRUE(same_bits(there.out(), expected)) << round;
    }
    comm.check("done");
    comm.barrier("done");
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

TEST_F(CudaExpertRanks, TheLayersOwnGate_RoutesEveryRanksRows) {
  MoeSpec spec = expert_ranks_spec();
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm);
    testing::expect_accurate(*owned, 5 + 60 * rank, kBar);
    comm.barrier("done");
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

// Rows that do not count: behind *num_tokens, under the mask, and slots of -1.
TEST_F(CudaExpertRanks, RowsThatDoNotCount_AddNothing_AndAreNotCounted) {
  const MoeSpec spec = expert_ranks_spec();
  constexpr int64_t kRows = 40;
  constexpr int64_t kLive = 31;
  constexpr int64_t kMasked = 4;
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm);
    RankCall call = call_of(spec, rank, kRows, DType::kBF16);
    int32_t* const ids = call.routing.ids.as<int32_t>();
    for (int64_t token = 0; token < kRows; token += 3) ids[token * 3 + 1] = -1;
    Tensor mask(DType::kBool, {kRows});
    std::fill_n(mask.as<bool>(), kRows, true);
    mask.as<bool>()[kMasked] = false;
    Tensor live(DType::kI64, {1});
    *live.as<int64_t>() = kLive;
    Tensor counts(DType::kI64, {spec.num_experts});
    std::fill_n(counts.as<int64_t>(), spec.num_experts, 0);
    const DeviceTensor device_mask = owned->queue.upload(mask.view());
    const DeviceTensor device_live = owned->queue.upload(live.view());
    DeviceTensor load = owned->queue.upload(counts.view());
    DeviceForward forward(*owned, call.hidden.view(), DType::kF32);
    forward.route_by(call.routing.ids, call.routing.weights);
    forward.args.padding_mask = device_mask.const_view();
    forward.args.num_tokens = static_cast<const int64_t*>(device_live.const_view().data);
    forward.args.expert_load = {static_cast<int64_t*>(load.view().data),
                                static_cast<size_t>(spec.num_experts)};
    forward.enqueue();
    const Tensor out = forward.out();
    owned->queue.download(load.const_view(), counts.view());
    int64_t slots = 0;
    for (int64_t token = 0; token < kLive; ++token) {
      if (token == kMasked) continue;
      for (int64_t slot = 0; slot < 3; ++slot) slots += ids[token * 3 + slot] >= 0;
    }
    int64_t counted = 0;
    for (int64_t e = 0; e < spec.num_experts; ++e) counted += counts.as<int64_t>()[e];
    EXPECT_EQ(counted, slots) << "of this rank's own tokens";
    // The same rows without padding have the same float32 sums.
    std::fill_n(ids + kMasked * 3, 3, -1);
    const Tensor plain = run_call(*owned, call, DType::kF32);
    for (int64_t at = 0; at < kRows * testing::kExpertRanksHidden; ++at) {
      const float value = out.as<float>()[at];
      if (at / testing::kExpertRanksHidden >= kLive) {
        ASSERT_TRUE(std::isnan(value))
            << "row " << at / testing::kExpertRanksHidden << " was written";
      } else {
        ASSERT_EQ(value, plain.as<float>()[at]) << at;
      }
    }
    comm.barrier("done");
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

TEST_F(CudaExpertRanks, SharedExpertsApart_AreThisRanksAlone) {
  MoeSpec spec = expert_ranks_spec();
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 256};
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm);
    const RankCall call = call_of(spec, rank, 33, DType::kBF16);
    const Tensor whole = run_call(*owned, call, DType::kF32);
    DeviceForward forward(*owned, call.hidden.view(), DType::kF32);
    forward.route_by(call.routing.ids, call.routing.weights);
    DeviceTensor shared = owned->queue.allocate(DType::kF32, {33, testing::kExpertRanksHidden});
    forward.args.shared_out = shared.view();
    forward.enqueue();
    const Tensor routed = forward.out();
    Tensor apart(DType::kF32, {33, testing::kExpertRanksHidden});
    owned->queue.download(shared.const_view(), apart.view());
    for (int64_t at = 0; at < 33 * testing::kExpertRanksHidden; ++at) {
      const float sum = routed.as<float>()[at] + apart.as<float>()[at];
      ASSERT_NEAR(sum, whole.as<float>()[at], 1e-4 + 1e-5 * std::abs(sum)) << at;
    }
    comm.barrier("done");
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

// It may have what would be refused with tokens, such as numbers in host memory.
TEST_F(CudaExpertRanks, OfACallWithoutTokens_NothingIsRead) {
  const MoeSpec spec = expert_ranks_spec();
  const int64_t on_host = 0;
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm);
    const RankCall call = call_of(spec, rank, rank == 0 ? 0 : 300, DType::kBF16);
    const Tensor expected = run_call(*owned, call, DType::kF32);
    DeviceForward forward(*owned, call.hidden.view(), DType::kF32);
    forward.route_by(call.routing.ids, call.routing.weights);
    if (rank == 0) forward.args.num_tokens = &on_host;
    forward.enqueue();
    owned->queue.synchronize();
    EXPECT_TRUE(same_bits(forward.out(), expected)) << rank;
    comm.barrier("done");
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

// Whatever the other rank brings, up to several chunks.
TEST_F(CudaExpertRanks, AWorkspaceForFewTokens_ServesThem) {
  const MoeSpec spec = expert_ranks_spec();
  const std::array<TokensOfRanks, 3> calls = {{{8, 7}, {8, 128}, {1, 300}}};
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm);
    for (const TokensOfRanks& tokens : calls) {
      const int64_t own = tokens[static_cast<size_t>(rank)];
      Workspace few(owned->context, owned->layer.workspace_bytes(own));
      const RankCall call = call_of(spec, rank, own, DType::kBF16);
      DeviceForward forward(*owned, call.hidden.view(), DType::kF32);
      forward.route_by(call.routing.ids, call.routing.weights);
      forward.args.workspace = &few;
      forward.enqueue();
      EXPECT_TRUE(same_bits(forward.out(), run_call(*owned, call, DType::kF32))) << own;
    }
    comm.barrier("done");
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

}  // namespace
}  // namespace conclave
