// Refits of tensor-parallel layers whose ranks, a GPU each, are connected by NCCL: from weights
// that one of them sends through device memory, all or none.
#include "comm/nccl/nccl_ranks.h"
#include "cuda/check.h"
#include "cuda/stream.h"
#include "layer/cuda/refit_cases.h"

#include "conclave/broadcast_weights.h"
#include "conclave/interop/cuda.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;
using testing::code_of;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::FailsAtRead;
using testing::first_failure;
using testing::kNcclRanks;
using testing::NcclTest;
using testing::random_routing;
using testing::random_tensor;
using testing::RefitCase;
using testing::run_nccl_ranks;
using testing::same_bits;

class CudaRefitRanks : public NcclTest {};

std::unique_ptr<DeviceLayer> layer_of_rank(const MoeSpec& spec, int32_t rank, Communicator& comm,
                                           uint64_t seed) {
  return std::make_unique<DeviceLayer>(
      ContextOptions{.device = "cuda:" + std::to_string(testing::device_of(rank)),
                     .num_threads = 2,
                     .tensor_communicator = &comm},
      spec, make_synthetic_source(spec, seed), LayerOptions{.max_tokens = 64},
      ParallelSpec{.tp_size = kNcclRanks, .tp_rank = rank});
}

// A forward that is captured once.
class Captured {
 public:
  Captured(DeviceLayer& owned, const MoeSpec& spec)
      : owned_(owned),
        hidden_(random_tensor(DType::kBF16, 20, spec.hidden_size, 5)),
        forward_(owned, hidden_.view(), DType::kF32) {
    const auto routing = random_routing(20, spec.num_experts, spec.top_k, 9);
    forward_.route_by(routing.ids, routing.weights);
    forward_.enqueue();  // the first call of a layer may load kernels
    static_cast<void>(forward_.out());
    graph_ = cuda::capture(stream(), [&] { forward_.enqueue(); });
  }
  Tensor run() {
    forward_.enqueue();
    return forward_.out();
  }
  Tensor replay() {
    owned_.queue.fill(forward_.args.out, 0xFF);
    cuda::check(cudaGraphLaunch(graph_.get(), stream()), "cudaGraphLaunch");
    return forward_.out();
  }

 private:
  cudaStream_t stream() const { return to_cuda(owned_.queue.stream()); }

  DeviceLayer& owned_;
  Tensor hidden_;
  DeviceForward forward_;
  cuda::OwnedGraph graph_;
};

// Slices of these layers begin with a byte.
std::vector<RefitCase> rank_cases() {
  std::vector<RefitCase> cases;
  for (RefitCase& each : testing::refit_cases()) {
    if (each.spec.weight_dtype != DType::kF16) cases.push_back(std::move(each));
  }
  return cases;
}

TEST_F(CudaRefitRanks, WeightsOfOneRank_ReachEveryRank) {
  for (const RefitCase& each : rank_cases()) {
    SCOPED_TRACE(each.name);
    const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
      const auto owned = layer_of_rank(each.spec, rank, comm, 3);
      const auto fresh = layer_of_rank(each.spec, rank, comm, 4);
      Captured captured(*owned, each.spec);
      Captured expected(*fresh, each.spec);
      const Tensor before = captured.run();
      const Tensor after = expected.run();
      EXPECT_FALSE(same_bits(before, after));
      for (const auto& memory : {std::optional<MemoryKind>(), std::optional(MemoryKind::kHost)}) {
        const BroadcastWeights received(owned->context, comm,
                                        rank == 1 ? fresh->source.get() : nullptr,
                                        {.root = 1, .memory = memory, .exchange_bytes = 9000});
        EXPECT_EQ(received.memory(), memory.value_or(MemoryKind::kDevice));
        Refit refit(owned->layer);
        refit.stage(received);
        EXPECT_TRUE(same_bits(captured.run(), before));
        refit.commit();
        EXPECT_TRUE(same_bits(captured.run(), after));
        EXPECT_TRUE(same_bits(captured.replay(), after));
        EXPECT_EQ(Refit::content_hash(owned->layer), Refit::content_hash(fresh->layer));
        Refit back(owned->layer);
        back.stage(*owned->source);
        back.commit();
        EXPECT_TRUE(same_bits(captured.replay(), before));
      }
      comm.barrier("done");
    });
    ASSERT_EQ(first_failure(outcomes), "");
  }
}

TEST_F(CudaRefitRanks, OneRankFails_NoneChanges) {
  const MoeSpec spec = testing::refit_cases()[2].spec;
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = layer_of_rank(spec, rank, comm, 3);
    Captured captured(*owned, spec);
    const Tensor before = captured.run();
    const auto second = make_synthetic_source(spec, 4);
    const FailsAtRead failing(*second, 5);
    Refit refit(owned->layer);
    if (rank == 0) {
      EXPECT_EQ(code_of([&] { refit.stage(failing); }), ErrorCode::kFileRead);
    } else {
      refit.stage(*second);
    }
    EXPECT_EQ(code_of([&] { refit.commit(); }),
              rank == 0 ? ErrorCode::kFileRead : ErrorCode::kCommMismatch);
    EXPECT_TRUE(same_bits(captured.run(), before));
    EXPECT_EQ(owned->layer.status().refit_epoch, 0U);
    refit.stage(*second);
    refit.commit();
    EXPECT_FALSE(same_bits(captured.run(), before));
    EXPECT_EQ(owned->layer.status().refit_epoch, 1U);
    comm.barrier("done");
  });
  ASSERT_EQ(first_failure(outcomes), "");
}

}  // namespace
}  // namespace conclave
