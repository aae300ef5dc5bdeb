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
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
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

// All matrices of a source in device memory, each on its own.
class OnDevice final : public WeightSource {
 public:
  OnDevice(const WeightSource& inner, const DeviceQueue& queue) : inner_(inner) {
    for (const WeightId id : weights::kAll) {
      const WeightInfo info = inner.describe(id);
      for (int64_t expert = 0; expert < info.count; ++expert) {
        const auto size = static_cast<int64_t>(dense_bytes(info.dtype, {info.rows, info.cols}));
        Tensor matrix(DType::kU8, {size});
        inner.read(id, expert, {0, info.rows, 0, info.cols},
                   {matrix.as<std::byte>(), static_cast<size_t>(size)});
        matrices_[id].push_back(queue.upload(matrix.const_view()));
      }
    }
  }
  MemoryKind memory() const override { return MemoryKind::kDevice; }
  WeightInfo describe(WeightId id) const override { return inner_.describe(id); }
  ConstTensorView view(WeightId id, int64_t expert) const override {
    const WeightInfo info = describe(id);
    return {.data = matrices_[id][static_cast<size_t>(expert)].view().data,
            .dtype = info.dtype,
            .shape = {info.rows, info.cols}};
  }
  void read(WeightId, int64_t, const WeightBlock&, std::span<std::byte>) const override {
    throw Error(ErrorCode::kDevice, {.what = "a layer reads views of device memory"});
  }

 private:
  const WeightSource& inner_;
  WeightTable<std::vector<DeviceTensor>> matrices_;
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

// A root whose weights lie on its device sends them from there, in one chunk or in many.
TEST_F(CudaRefitRanks, WeightsOnTheRootsDevice_ReachEveryRank) {
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    for (const RefitCase& each : rank_cases()) {
      SCOPED_TRACE(each.name);
      const auto owned = layer_of_rank(each.spec, rank, comm, 3);
      const auto fresh = layer_of_rank(each.spec, rank, comm, 4);
      const OnDevice on_device(*fresh->source, owned->queue);
      for (const int64_t exchange : {int64_t{9000}, int64_t{1} << 26}) {
        Refit refit(owned->layer);
        refit.stage_broadcast(comm, rank == 0 ? &on_device : nullptr, {.exchange_bytes = exchange});
        refit.commit();
        EXPECT_EQ(Refit::content_hash(owned->layer), Refit::content_hash(fresh->layer));
        Refit back(owned->layer);
        back.stage(*owned->source);
        back.commit();
      }
    }
    comm.barrier("done");
  });
  ASSERT_EQ(first_failure(outcomes), "");
}

// Before the stage in which the other one waits for weights, and before its commit.
TEST_F(CudaRefitRanks, RankThatWithdraws_EndsTheOthersWaitAtOnce) {
  const MoeSpec spec = testing::refit_cases()[2].spec;
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = layer_of_rank(spec, rank, comm, 3);
    const auto second = make_synthetic_source(spec, 4);
    Captured captured(*owned, spec);
    const Tensor before = captured.run();
    for (const int32_t stages : {0, 1}) {
      Refit refit(owned->layer, {.communicator = &comm});
      const auto stage = [&] {
        refit.stage_broadcast(comm, rank == 0 ? second.get() : nullptr, {});
      };
      if (stages == 1) stage();
      if (rank == stages) {
        refit.withdraw("no step");
        continue;
      }
      try {
        stages == 0 ? stage() : refit.commit();
        ADD_FAILURE() << "nobody was told";
      } catch (const CommError& error) {
        EXPECT_EQ(error.code(), ErrorCode::kCommMismatch);
        EXPECT_EQ(error.peer(), stages);
        EXPECT_NE(std::string(error.what()).find("has withdrawn: no step"), std::string::npos);
      }
    }
    EXPECT_TRUE(same_bits(captured.run(), before));
    Refit refit(owned->layer);
    refit.stage_broadcast(comm, rank == 0 ? second.get() : nullptr, {});
    refit.commit();
    EXPECT_FALSE(same_bits(captured.run(), before));
    EXPECT_EQ(owned->layer.status().refit_epoch, 1U);
    comm.barrier("done");
  });
  ASSERT_EQ(first_failure(outcomes), "");
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
