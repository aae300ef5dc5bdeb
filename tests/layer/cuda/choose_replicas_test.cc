// The replicas that the device chooses, and the counters of the experts they stand for.
#include "layer/stages/cuda/prepare_rows.h"
#include "support/cuda/device_array.h"

#include "conclave/placement.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace conclave {
namespace {

using testing::DeviceArray;

class ChooseReplicasOnDevice : public testing::DeviceTest {};

// Expert 0 has one replica, 1 has three, 2 has none here, 3 has two. Ids of tokens behind the live
// ones may be anything: they count nowhere.
TEST_F(ChooseReplicasOnDevice, LiveTokens_LoadTheirExperts) {
  constexpr int64_t kTokens = 300;
  constexpr int64_t kFirstToken = 7;
  constexpr int32_t kTopK = 3;
  const std::vector<int32_t> first = {0, 1, 4, 4, 6};
  const std::vector<int32_t> replicas = {0, 1, 4, 5, 2, 3};
  std::vector<int32_t> ids(static_cast<size_t>(kTokens * kTopK));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * i % 5) - 1;
  for (const int64_t live : {int64_t{-1}, int64_t{0}, int64_t{1}, int64_t{200}, kTokens}) {
    const int64_t counted = live < 0 ? kTokens : live;
    std::vector<int64_t> load(4, 0);
    std::vector<int32_t> physical(ids.size(), -1);
    for (int64_t slot = 0; slot < kTokens * kTopK; ++slot) {
      const auto at = static_cast<size_t>(slot);
      if (ids[at] < 0) continue;
      const auto id = static_cast<size_t>(ids[at]);
      const int64_t token = slot / kTopK;
      const auto count = static_cast<uint32_t>(first[id + 1] - first[id]);
      if (count > 0) {
        const uint32_t hash = replica_hash(kFirstToken + token);
        physical[at] = replicas[static_cast<size_t>(first[id]) + hash % count];
      }
      if (token < counted) ++load[id];
    }
    const DeviceArray<int32_t> given(ids);
    const DeviceArray<int32_t> firsts(first);
    const DeviceArray<int32_t> all(replicas);
    const DeviceArray<int64_t> counter(std::vector<int64_t>{live});
    const DeviceArray<int64_t> loads(std::vector<int64_t>(4, 0));
    const DeviceArray<int32_t> chosen(ids.size());
    choose_replicas({.ids = given.data(),
                     .num_tokens = kTokens,
                     .live_tokens = live < 0 ? nullptr : counter.data(),
                     .top_k = kTopK,
                     .first_token = kFirstToken,
                     .first = firsts.data(),
                     .replicas = all.data(),
                     .physical = chosen.data(),
                     .expert_load = loads.data()},
                    stream());
    wait();
    EXPECT_EQ(chosen.download(), physical);
    EXPECT_EQ(loads.download(), load) << live << " live";
  }
}

}  // namespace
}  // namespace conclave
