// Expert-parallel and tensor-parallel ranks at once: 2 x 2 GPUs, each in a group of either kind.
#include "expert_ranks.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;
using testing::call_of;
using testing::DeviceLayer;
using testing::make_spec;
using testing::RankCall;
using testing::run_call;
using testing::same_bits;
using testing::TokensOfRanks;

constexpr int32_t kSlices = 2;
constexpr int32_t kExpertRanks = 2;

class CudaExpertSlices : public testing::NcclTest {
 protected:
  void SetUp() override {
    testing::NcclTest::SetUp();
    if (IsSkipped()) return;
    const cuda::DeviceCount devices = cuda::count_devices();
    if (devices.count < kSlices * kExpertRanks) {
      GTEST_SKIP() << "needs 4 GPUs; there are " << devices.count;
    }
  }
};

// The communicator of one of the groups, over a local one of the same ranks.
std::unique_ptr<Communicator> connect_over(Communicator& local, const std::string& device) {
  return connect("nccl", {.rank = local.rank(),
                          .size = local.size(),
                          .bootstrap = &local,
                          .device = device,
                          .timeout = 20s});
}

struct Place {
  int32_t expert_rank = 0;
  int32_t slice = 0;
};

void run_place(const MoeSpec& spec, const Place& place, Communicator& expert_peers,
               Communicator& slice_peers) {
  const std::string device = "cuda:" + std::to_string(place.expert_rank * kSlices + place.slice);
  const cuda::DeviceGuard guard(place.expert_rank * kSlices + place.slice);
  const auto experts = connect_over(expert_peers, device);
  const auto slices = connect_over(slice_peers, device);
  DeviceLayer owned({.device = device,
                     .num_threads = 2,
                     .communicator = experts.get(),
                     .tensor_communicator = slices.get()},
                    spec, make_synthetic_source(spec, 11), {.max_tokens = 128},
                    {.ep_size = kExpertRanks,
                     .ep_rank = place.expert_rank,
                     .tp_size = kSlices,
                     .tp_rank = place.slice});
  for (const TokensOfRanks& tokens : {TokensOfRanks{3, 70}, {0, 5}, {200, 40}}) {
    const int64_t own = tokens[static_cast<size_t>(place.expert_rank)];
    const RankCall call = call_of(spec, place.expert_rank, own, DType::kBF16);
    const Tensor out = run_call(owned, call, DType::kF32);
    EXPECT_TRUE(same_bits(out, run_call(owned, call, DType::kF32, tokens))) << own;
    EXPECT_TRUE(testing::same_on_all(*slices, {out.as<std::byte>(), out.size_bytes()})) << own;
    if (own == 0 || place.slice != 0) continue;
    EXPECT_LE(testing::worst_error(owned, call.hidden, call.routing, out), 6e-3) << own;
  }
  experts->barrier("done");
  slices->barrier("done");
}

TEST_F(CudaExpertSlices, RowsGather_AndSlicesAddUp) {
  MoeSpec spec = make_spec(10, 3, 264, 512, DType::kBF16);
  spec.has_bias = true;
  spec.has_output_bias = true;
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 192};
  std::array<std::vector<std::unique_ptr<Communicator>>, kSlices> of_experts;
  std::array<std::vector<std::unique_ptr<Communicator>>, kExpertRanks> of_slices;
  for (auto& group : of_experts) group = make_local_group({.num_ranks = kExpertRanks});
  for (auto& group : of_slices) group = make_local_group({.num_ranks = kSlices});
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < kExpertRanks; ++rank) {
    for (int32_t slice = 0; slice < kSlices; ++slice) {
      threads.emplace_back([&, rank, slice] {
        const auto at = [](int32_t number) { return static_cast<size_t>(number); };
        try {
          run_place(spec, {rank, slice}, *of_experts[at(slice)][at(rank)],
                    *of_slices[at(rank)][at(slice)]);
        } catch (const std::exception& error) {
          ADD_FAILURE() << rank << ", " << slice << ": " << error.what();
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace conclave
