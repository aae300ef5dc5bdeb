// D1 and D2: a token's bits do not depend on the run, its neighbours, its place, chunks or threads.

#include "support/in_sample.h"
#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::gather_rows;
using testing::make_layer;
using testing::make_spec;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::row_bytes;
using testing::run_layer;
using testing::same_bits;

std::vector<int64_t> shuffled(int64_t count, uint32_t seed) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  return order;
}

// Counts tokens whose bits differ when the same tokens come alone, and in another order.
struct Variance {
  int64_t moved = 0;  // guards against a comparison of rows that stayed where they were
  int64_t differing = 0;
};

Variance row_order_variance(const MoeLayer& layer, const Tensor& hidden) {
  const int64_t tokens = hidden.shape()[0];
  const auto straight = run_layer(layer, hidden.view(), DType::kF32);
  const std::vector<int64_t> order = shuffled(tokens, 7);
  const Tensor permuted = gather_rows(hidden, order);
  const auto mixed = run_layer(layer, permuted.const_view(), DType::kF32);
  Variance variance;
  for (int64_t row = 0; row < tokens; ++row) {
    const int64_t original = order[static_cast<size_t>(row)];
    variance.moved += original != row;
    const Tensor alone_hidden = gather_rows(hidden, {original});
    const auto alone = run_layer(layer, alone_hidden.const_view(), DType::kF32);
    const auto expected = row_bytes(straight.out, original);
    variance.differing += row_bytes(mixed.out, row) != expected;
    variance.differing += row_bytes(alone.out, 0) != expected;
  }
  return variance;
}

class Determinism : public ::testing::TestWithParam<std::string> {};

TEST_P(Determinism, RowOrderAndBatchSize_DoNotChangeATokensBits) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    MoeSpec spec = make_spec(12, 4, 96, 80, dtype);
    spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 40};
    const OwnedLayer owned = make_layer(spec, {.max_tokens = 64}, {.isa = GetParam()});
    const Variance variance = row_order_variance(owned.layer, random_tensor(dtype, 150, 96, 1));
    EXPECT_GT(variance.moved, 100);
    EXPECT_EQ(variance.differing, 0) << to_string(dtype);
  }
}

TEST_P(Determinism, ThreadsAndChunks_DoNotChangeABit) {
  const MoeSpec spec = make_spec(9, 3, 72, 56, DType::kBF16);
  const Tensor hidden = random_tensor(DType::kBF16, 201, 72, 2);
  const OwnedLayer one =
      make_layer(spec, {.max_tokens = 512}, {.num_threads = 1, .isa = GetParam()});
  const auto expected = run_layer(one.layer, hidden.view(), DType::kBF16);
  for (const int32_t threads : {2, 3, 8}) {
    for (const int64_t max_tokens : {1, 7, 64, 201, 1000}) {
      const OwnedLayer other =
          make_layer(spec, {.max_tokens = max_tokens}, {.num_threads = threads, .isa = GetParam()});
      EXPECT_TRUE(same_bits(run_layer(other.layer, hidden.view(), DType::kBF16).out, expected.out))
          << threads << " threads, chunks of " << max_tokens;
    }
  }
}

TEST_P(Determinism, ManyRuns_GiveOneResult) {
  const OwnedLayer owned =
      make_layer(make_spec(8, 2, 64, 64, DType::kBF16), {}, {.num_threads = 4, .isa = GetParam()});
  const Tensor hidden = random_tensor(DType::kBF16, 33, 64, 3);
  const auto expected = run_layer(owned.layer, hidden.view(), DType::kBF16);
  for (size_t run = 0; run < 1000; ++run) {
    if (!testing::in_sample(run, 5)) continue;
    ASSERT_TRUE(same_bits(run_layer(owned.layer, hidden.view(), DType::kBF16).out, expected.out))
        << "run " << run;
  }
}

INSTANTIATE_TEST_SUITE_P(EveryRow, Determinism, ::testing::ValuesIn(testing::usable_isas()),
                         [](const auto& row) { return row.param; });

// f32_fma is one arithmetic: all rows that implement it agree bit for bit.
TEST(Arithmetic, RowsOfFloat32Fma_AgreeBitwise) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const MoeSpec spec = make_spec(8, 3, 100, 70, dtype);
    const Tensor hidden = random_tensor(dtype, 50, 100, 4);
    const OwnedLayer scalar = make_layer(spec, {.kernel = "cpu.reference"}, {.isa = "scalar"});
    const auto expected = run_layer(scalar.layer, hidden.view(), DType::kF32);
    for (const std::string& isa : testing::usable_isas()) {
      const OwnedLayer other = make_layer(spec, {.arithmetic = "f32_fma"}, {.isa = isa});
      EXPECT_TRUE(same_bits(run_layer(other.layer, hidden.view(), DType::kF32).out, expected.out))
          << isa << " " << to_string(dtype) << " chose " << other.layer.plan().tile;
    }
  }
}

// Negative control: this router's slot order depends on a token's place, so the sum over slots
// varies. The comparison above must notice it.
class PlaceDependentRouter final : public Router {
 public:
  explicit PlaceDependentRouter(int64_t top_k) : top_k_(top_k) {}
  RouterStats route(const RouterInput& input, const RouterOutput& output,
                    Executor&) const override {
    for (int64_t token = 0; token < input.num_tokens; ++token) {
      for (int64_t slot = 0; slot < top_k_; ++slot) {
        const int64_t choice = token % 2 == 0 ? slot : top_k_ - 1 - slot;
        output.topk_ids[token * top_k_ + slot] = static_cast<int32_t>(choice);
        output.topk_weights[token * top_k_ + slot] = 0.1F + 0.2F * static_cast<float>(choice);
      }
    }
    return {};
  }

 private:
  int64_t top_k_;
};

TEST(DeterminismControl, VariantReduction_IsCaught) {
  MoeSpec spec = make_spec(8, 6, 96, 80, DType::kF32);
  spec.router.name = "place_dependent";
  Context context({.num_threads = 2});
  context.add_router("place_dependent", [](const MoeSpec& s) {
    return std::make_unique<PlaceDependentRouter>(s.top_k);
  });
  const auto source = make_synthetic_source(spec, 1);
  const MoeLayer layer = MoeLayer::create(context, spec, *source);
  const Variance variance = row_order_variance(layer, random_tensor(DType::kF32, 60, 96, 1));
  EXPECT_GT(variance.differing, 0);
}

}  // namespace
}  // namespace conclave
