// Layers with every combination of parts, drawn at random: values that are not finite stay in their
// token, a token has its bits in any batch, calls run side by side, and a reloaded layer is a new
// one.

#include "support/layer_parts.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using testing::gather_rows;
using testing::LayerOutput;
using testing::make_layer;
using testing::OwnedLayer;
using testing::parts_text;
using testing::random_tensor;
using testing::row_bytes;
using testing::run_layer;
using testing::same_bits;
using testing::SpecDraw;

constexpr int64_t kTokens = 19;

class RandomPromise : public ::testing::TestWithParam<uint32_t> {
 protected:
  RandomPromise() {
    SpecDraw draw(GetParam() + 500);
    spec_ = draw.draw();
    isa_ = testing::usable_isas()[GetParam() % testing::usable_isas().size()];
    hidden_ = random_tensor(DType::kF32, kTokens, spec_.hidden_size, GetParam());
  }

  OwnedLayer layer(uint64_t seed = 11) const {
    return make_layer(spec_, {.max_tokens = 8}, {.isa = isa_}, seed);
  }
  LayerOutput run(const OwnedLayer& owned, const Tensor& hidden, ForwardArgs args = {}) const {
    return run_layer(owned.layer, hidden.view(), DType::kF32, args);
  }
  std::string trace() const { return parts_text(spec_) + ", " + isa_; }

  MoeSpec spec_;
  std::string isa_;
  Tensor hidden_;
};

TEST_P(RandomPromise, NonFiniteActivation_StaysInItsToken) {
  SCOPED_TRACE(trace());
  const OwnedLayer owned = layer();
  const LayerOutput expected = run(owned, hidden_);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float value :
       {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity, 3e38F}) {
    Tensor spoilt =
        gather_rows(hidden_, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18});
    for (const int64_t token : {3, 12}) {
      spoilt.as<float>()[token * spec_.hidden_size + token] = value;
    }
    const LayerOutput output = run(owned, spoilt);
    for (int64_t token = 0; token < kTokens; ++token) {
      if (token == 3 || token == 12) continue;
      EXPECT_EQ(row_bytes(output.out, token), row_bytes(expected.out, token)) << token;
    }
  }
}

TEST_P(RandomPromise, Token_HasTheSameBitsAloneAndInAnyOrder) {
  SCOPED_TRACE(trace());
  const OwnedLayer owned = layer();
  const LayerOutput expected = run(owned, hidden_);
  const std::vector<int64_t> order = {18, 4, 4, 0, 9, 17, 1, 12, 2, 16};
  const LayerOutput shuffled = run(owned, gather_rows(hidden_, order));
  for (size_t i = 0; i < order.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    EXPECT_EQ(row_bytes(shuffled.out, at), row_bytes(expected.out, order[i])) << i;
  }
  for (const int64_t token : {7, 18}) {
    const LayerOutput alone = run(owned, gather_rows(hidden_, {token}));
    EXPECT_EQ(row_bytes(alone.out, 0), row_bytes(expected.out, token)) << token;
  }
}

TEST_P(RandomPromise, ConcurrentForwards_GiveTheBitsOfOneAfterAnother) {
  SCOPED_TRACE(trace());
  const OwnedLayer owned = layer();
  const LayerOutput expected = run(owned, hidden_);
  std::vector<std::thread> threads;
  std::vector<char> same(4, 0);
  for (size_t i = 0; i < same.size(); ++i) {
    threads.emplace_back([&, i] {
      Workspace workspace(*owned.context, owned.layer.workspace_bytes());
      std::memset(workspace.memory().data(), 0xff, workspace.memory().size());
      bool all = true;
      for (int repeat = 0; repeat < 4; ++repeat) {
        const LayerOutput output = run(owned, hidden_, {.workspace = &workspace});
        all = all && same_bits(output.out, expected.out) && same_bits(output.ids, expected.ids);
      }
      same[i] = all ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const char one : same) EXPECT_EQ(one, 1);
}

TEST_P(RandomPromise, Reload_GivesTheLayerOfTheNewWeights) {
  SCOPED_TRACE(trace());
  const auto other = make_synthetic_source(spec_, 77);
  const LayerOutput expected = run(layer(77), hidden_);
  for (const ReloadMode mode : {ReloadMode::kStaged, ReloadMode::kInPlace}) {
    OwnedLayer owned = layer();
    const LayerOutput before = run(owned, hidden_);
    owned.layer.reload(*other, mode);
    EXPECT_TRUE(same_bits(run(owned, hidden_).out, expected.out));
    owned.layer.reload(*owned.source, mode);
    EXPECT_TRUE(same_bits(run(owned, hidden_).out, before.out));
  }
}

INSTANTIATE_TEST_SUITE_P(Draws, RandomPromise, ::testing::Range(0U, 40U));

}  // namespace
}  // namespace conclave
