// Tensor-parallel layers whose ranks, a GPU each, add up over NCCL: within the bar of float64 as
// one GPU is, with the same bits on every rank, every time, and in a graph.
#include "comm/nccl/nccl_ranks.h"
#include "cuda/check.h"
#include "cuda/stream.h"
#include "device_layer.h"

#include "conclave/interop/cuda.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::first_failure;
using testing::GivenRouting;
using testing::kNcclRanks;
using testing::make_spec;
using testing::NcclTest;
using testing::on_nccl_ranks;
using testing::random_routing;
using testing::random_tensor;
using testing::run_nccl_ranks;
using testing::same_bits;

constexpr int64_t kHidden = 264;
constexpr int64_t kExperts = 10;
constexpr int64_t kTopK = 3;

struct Case {
  std::string name;
  MoeSpec spec;
  DType rows = DType::kBF16;
};

MoeSpec spec_of(DType dtype, const QuantSpec& quant = {}, int64_t hidden = kHidden) {
  MoeSpec spec = make_spec(kExperts, kTopK, hidden, 512, dtype);
  spec.quant = quant;
  return spec;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  all.push_back({"bf16", spec_of(DType::kBF16)});
  MoeSpec full = spec_of(DType::kBF16);
  full.has_bias = true;
  full.has_output_bias = true;
  full.output_scale = 2.5;
  full.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 192, .has_bias = true};
  full.residual = {.intermediate_size = 128};
  all.push_back({"biases, shared experts, a residual MLP", full});
  MoeSpec fused = spec_of(DType::kF16);
  fused.shared = {.mode = SharedMode::kAdd, .intermediate_size = 512};
  all.push_back({"f16, shared experts as slots", fused, DType::kF16});
  MoeSpec zero = spec_of(DType::kBF16);
  zero.num_zero_experts = 2;
  all.push_back({"zero experts", zero});
  MoeSpec latent = spec_of(DType::kBF16);
  latent.latent = {.size = 128};
  all.push_back({"a latent layer", latent});
  all.push_back(
      {"e4m3 in blocks",
       spec_of(DType::kF8E4M3,
               {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup}, 256)});
  all.push_back(
      {"int4 in groups",
       spec_of(DType::kI4, {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32},
               256)});
  return all;
}

std::unique_ptr<DeviceLayer> layer_of_rank(const MoeSpec& spec, int32_t rank, Communicator& comm,
                                           const LayerOptions& options = {.max_tokens = 128}) {
  return std::make_unique<DeviceLayer>(
      ContextOptions{.device = "cuda:" + std::to_string(testing::device_of(rank)),
                     .num_threads = 2,
                     .tensor_communicator = &comm},
      spec, make_synthetic_source(spec, 11), options,
      ParallelSpec{.tp_size = kNcclRanks, .tp_rank = rank});
}

Tensor run(DeviceLayer& owned, const Tensor& hidden, const GivenRouting& routing, DType out) {
  DeviceForward forward(owned, hidden.view(), out);
  forward.route_by(routing.ids, routing.weights);
  forward.enqueue();
  return forward.out();
}

class CudaTensorRanks : public NcclTest {};

// 300 tokens take three chunks.
constexpr std::array<int64_t, 5> kTokens = {0, 1, 7, 65, 300};

bool same_on_all(Communicator& comm, const Tensor& tensor) {
  return testing::same_on_all(comm, {tensor.as<std::byte>(), tensor.size_bytes()});
}

TEST_F(CudaTensorRanks, OutputsAreWithinTheBar_AndTheSameOnEveryRank) {
  constexpr double kBar = 6e-3;
  for (const Case& it : cases()) {
    SCOPED_TRACE(it.name);
    const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
      const auto owned = layer_of_rank(it.spec, rank, comm);
      std::unique_ptr<DeviceLayer> alone;
      if (rank == 0)
        alone = std::make_unique<DeviceLayer>(it.spec, LayerOptions{.max_tokens = 128});
      for (const int64_t tokens : kTokens) {
        const Tensor hidden = random_tensor(it.rows, tokens, it.spec.hidden_size, 5);
        const GivenRouting routing = random_routing(tokens, kExperts, kTopK, 9);
        for (const DType type : {it.rows, DType::kF32}) {
          const Tensor out = run(*owned, hidden, routing, type);
          EXPECT_TRUE(same_bits(out, run(*owned, hidden, routing, type))) << it.name << tokens;
          EXPECT_TRUE(same_on_all(comm, out)) << it.name << ", " << tokens;
          if (rank != 0 || tokens == 0) continue;
          const Tensor whole = run(*alone, hidden, routing, type);
          EXPECT_LE(testing::worst_error(*alone, hidden, routing, out), kBar) << it.name << tokens;
          EXPECT_LE(testing::worst_error(*alone, hidden, routing, whole), kBar) << it.name;
        }
      }
      comm.check("done");
      comm.barrier("done");
    });
    ASSERT_EQ(first_failure(outcomes), "");
  }
}

double difference(const Tensor& a, const Tensor& b) {
  double off = 0;
  double size = 0;
  const int64_t count = a.shape()[0] * a.shape()[1];
  for (int64_t i = 0; i < count; ++i) {
    off += std::pow(a.as<float>()[i] - b.as<float>()[i], 2);
    size += std::pow(b.as<float>()[i], 2);
  }
  return std::sqrt(off / size);
}

// The routed and the shared part of one forward, apart.
struct Apart {
  Tensor out;
  Tensor shared;
};
Apart run_apart(DeviceLayer& owned, const Tensor& hidden, const GivenRouting& routing) {
  DeviceForward forward(owned, hidden.view(), DType::kF32);
  forward.route_by(routing.ids, routing.weights);
  DeviceTensor shared =
      owned.queue.allocate(DType::kF32, {hidden.shape()[0], owned.layer.spec().hidden_size});
  forward.args.shared_out = shared.view();
  forward.enqueue();
  Apart apart{forward.out(), Tensor(DType::kF32, {hidden.shape()[0], hidden.shape()[1]})};
  owned.queue.download(shared.const_view(), apart.shared.view());
  return apart;
}

TEST_F(CudaTensorRanks, SharedExpertsApart_AreAddedUpToo) {
  MoeSpec spec = spec_of(DType::kBF16);
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 192};
  const Tensor hidden = random_tensor(DType::kBF16, 33, kHidden, 5);
  const GivenRouting routing = random_routing(33, kExperts, kTopK, 9);
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = layer_of_rank(spec, rank, comm);
    const Apart sums = run_apart(*owned, hidden, routing);
    EXPECT_TRUE(same_on_all(comm, sums.out));
    EXPECT_TRUE(same_on_all(comm, sums.shared));
    if (rank == 0) {
      DeviceLayer alone(spec, LayerOptions{.max_tokens = 128});
      const Apart whole = run_apart(alone, hidden, routing);
      EXPECT_LE(difference(sums.out, whole.out), 6e-3);
      EXPECT_LE(difference(sums.shared, whole.shared), 6e-3);
    }
    comm.barrier("done");
  });
  ASSERT_EQ(first_failure(outcomes), "");
}

TEST_F(CudaTensorRanks, AGraphOfAForward_HasTheBitsOfTheForward) {
  for (const Case& it : {cases()[0], cases()[1], cases()[5]}) {
    for (const int64_t tokens : {int64_t{3}, int64_t{100}}) {
      SCOPED_TRACE(it.name + ", " + std::to_string(tokens));
      const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
        const auto owned = layer_of_rank(it.spec, rank, comm);
        const Tensor first = random_tensor(it.rows, tokens, it.spec.hidden_size, 1);
        const GivenRouting routing = random_routing(tokens, kExperts, kTopK, 9);
        // The first call of a layer may load kernels.
        static_cast<void>(run(*owned, first, routing, DType::kF32));
        DeviceForward forward(*owned, first.view(), DType::kF32);
        forward.route_by(routing.ids, routing.weights);
        CUstream_st* const stream = to_cuda(owned->queue.stream());
        const cuda::OwnedGraph graph = cuda::capture(stream, [&] { forward.enqueue(); });
        for (uint64_t round = 0; round < 5; ++round) {
          const Tensor hidden = random_tensor(it.rows, tokens, it.spec.hidden_size, 20 + round);
          owned->queue.upload(hidden.const_view(), forward.hidden().view());
          cuda::check(cudaGraphLaunch(graph.get(), stream), "cudaGraphLaunch");
          const Tensor replayed = forward.out();
          EXPECT_TRUE(same_bits(replayed, run(*owned, hidden, routing, DType::kF32))) << round;
        }
        comm.check("done");
        comm.barrier("done");
      });
      ASSERT_EQ(first_failure(outcomes), "");
    }
  }
}

TEST_F(CudaTensorRanks, RanksWithOtherTokens_LearnItAtTheNextCall) {
  const MoeSpec spec = spec_of(DType::kBF16);
  on_nccl_ranks(2s, [&](int32_t rank, Communicator& comm) {
    const auto owned = layer_of_rank(spec, rank, comm);
    const int64_t tokens = 5 + 2 * rank;
    const Tensor hidden = random_tensor(DType::kBF16, tokens, kHidden, 5);
    const GivenRouting routing = random_routing(tokens, kExperts, kTopK, 9);
    static_cast<void>(run(*owned, hidden, routing, DType::kF32));
    std::this_thread::sleep_for(500ms);
    try {
      static_cast<void>(run(*owned, hidden, routing, DType::kF32));
      ADD_FAILURE() << "accepted";
    } catch (const CommError& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCommMismatch) << error.what();
      EXPECT_EQ(error.peer(), 1 - rank);
    }
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  });
}

TEST_F(CudaTensorRanks, LayersThatDiffer_AreNotCreated) {
  const auto outcomes = run_nccl_ranks(10s, [&](int32_t rank, Communicator& comm) {
    MoeSpec spec = spec_of(DType::kBF16);
    spec.output_scale = rank == 0 ? 1 : 2;
    static_cast<void>(layer_of_rank(spec, rank, comm));
  });
  for (const testing::RankOutcome& outcome : outcomes) {
    ASSERT_TRUE(outcome.code.has_value());
    EXPECT_EQ(*outcome.code, ErrorCode::kCommMismatch) << outcome.message;
    EXPECT_NE(outcome.message.find("output_scale"), std::string::npos) << outcome.message;
  }
}

TEST_F(CudaTensorRanks, ARankThatDoesNotCall_EndsTheWaitOfTheOther) {
  const MoeSpec spec = spec_of(DType::kBF16);
  on_nccl_ranks(1s, [&](int32_t rank, Communicator& comm) {
    const auto owned = layer_of_rank(spec, rank, comm);
    const Tensor hidden = random_tensor(DType::kBF16, 9, kHidden, 5);
    const GivenRouting routing = random_routing(9, kExperts, kTopK, 9);
    static_cast<void>(run(*owned, hidden, routing, DType::kF32));
    if (rank == 1) {
      std::this_thread::sleep_for(3s);
    } else {
      // Returns in spite of the missing rank; the next call says why its result is none.
      static_cast<void>(run(*owned, hidden, routing, DType::kF32));
    }
    try {
      static_cast<void>(run(*owned, hidden, routing, DType::kF32));
      ADD_FAILURE() << "accepted";
    } catch (const CommError& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCommTimeout) << error.what();
      EXPECT_EQ(error.peer(), 1);
    }
  });
}

}  // namespace
}  // namespace conclave
