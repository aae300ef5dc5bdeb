// Tests what a forward does with each of its arguments.

#include "core/float_convert.h"
#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::make_layer;
using testing::make_spec;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::row_bytes;
using testing::run_layer;
using testing::same_bits;

constexpr int64_t kHidden = 48;
MoeSpec spec_of(DType dtype = DType::kBF16) { return make_spec(6, 2, kHidden, 40, dtype); }

TEST(Forward, NoTokens_WritesNothing) {
  const OwnedLayer owned = make_layer(spec_of());
  const auto output = run_layer(owned.layer, Tensor(DType::kF32, {0, kHidden}).view(), DType::kF32);
  EXPECT_EQ(output.out.shape()[0], 0);
  owned.layer.forward({.hidden = {.dtype = DType::kF32, .shape = {0, kHidden}},
                       .out = {.dtype = DType::kF32, .shape = {0, kHidden}}});
  EXPECT_EQ(owned.layer.status().tokens, 0);
  EXPECT_EQ(owned.layer.status().forwards, 2);
}

TEST(Forward, LogitsOrIdsGiven_EqualTheLayersOwnRouting) {
  const OwnedLayer owned = make_layer(spec_of());
  const Tensor hidden = random_tensor(DType::kBF16, 21, kHidden, 1);
  const auto own = run_layer(owned.layer, hidden.view(), DType::kF32);
  const auto by_logits =
      run_layer(owned.layer, hidden.view(), DType::kF32, {.router_logits = own.logits.view()});
  EXPECT_TRUE(same_bits(by_logits.out, own.out));
  const auto by_ids = run_layer(owned.layer, hidden.view(), DType::kF32,
                                {.topk_ids = own.ids.view(), .topk_weights = own.weights.view()});
  EXPECT_TRUE(same_bits(by_ids.out, own.out));
  Tensor wide_ids(DType::kI64, {21, 2});
  std::copy_n(own.ids.as<int32_t>(), 42, wide_ids.as<int64_t>());
  const auto by_wide_ids =
      run_layer(owned.layer, hidden.view(), DType::kF32,
                {.topk_ids = wide_ids.view(), .topk_weights = own.weights.view()});
  EXPECT_TRUE(same_bits(by_wide_ids.out, own.out));
}

TEST(Forward, RouterInput_DecidesTheRoutingOnly) {
  const OwnedLayer owned = make_layer(spec_of());
  const Tensor hidden = random_tensor(DType::kBF16, 9, kHidden, 1);
  const Tensor router_input = random_tensor(DType::kF32, 9, kHidden, 2);
  const auto routed = run_layer(owned.layer, router_input.view(), DType::kF32);
  const auto output =
      run_layer(owned.layer, hidden.view(), DType::kF32, {.router_input = router_input.view()});
  EXPECT_TRUE(same_bits(output.ids, routed.ids));
  EXPECT_FALSE(same_bits(output.out, routed.out));
}

TEST(Forward, InPlace_EqualsOutOfPlace) {
  const OwnedLayer owned = make_layer(spec_of(), {.max_tokens = 8});
  Tensor hidden = random_tensor(DType::kBF16, 21, kHidden, 1);
  const auto expected = run_layer(owned.layer, hidden.view(), DType::kBF16);
  owned.layer.forward({.hidden = hidden.view(), .out = hidden.view()});
  EXPECT_TRUE(same_bits(hidden, expected.out));
}

TEST(Forward, StridedRows_EqualDenseRowsAndGapsStay) {
  const OwnedLayer owned = make_layer(spec_of(), {.max_tokens = 4});
  const Tensor hidden = random_tensor(DType::kF32, 10, kHidden, 1);
  const auto expected = run_layer(owned.layer, hidden.view(), DType::kF32);
  constexpr int64_t kStride = kHidden + 5;
  std::vector<float> in(10 * kStride, 7.0F);
  std::vector<float> out(10 * kStride, 7.0F);
  for (int64_t row = 0; row < 10; ++row) {
    std::copy_n(hidden.as<float>() + row * kHidden, kHidden, in.begin() + row * kStride);
  }
  owned.layer.forward({.hidden = {in.data(), DType::kF32, {10, kHidden}, kStride},
                       .out = {out.data(), DType::kF32, {10, kHidden}, kStride}});
  for (int64_t row = 0; row < 10; ++row) {
    EXPECT_TRUE(std::equal(out.begin() + row * kStride, out.begin() + row * kStride + kHidden,
                           expected.out.as<float>() + row * kHidden));
    for (int64_t gap = kHidden; gap < kStride; ++gap) {
      EXPECT_EQ(out[static_cast<size_t>(row * kStride + gap)], 7.0F);
    }
  }
}

TEST(Forward, PaddingTokens_AreZeroAndOthersUnchanged) {
  MoeSpec spec = spec_of();
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 24};
  const OwnedLayer owned = make_layer(spec, {.max_tokens = 5});
  Tensor hidden = random_tensor(DType::kBF16, 12, kHidden, 1);
  const auto expected = run_layer(owned.layer, hidden.view(), DType::kF32);
  Tensor mask(DType::kBool, {12});
  for (int i = 0; i < 12; ++i) mask.as<uint8_t>()[i] = i % 3 != 0;
  // Padding rows may hold anything.
  for (int i = 0; i < 12; i += 3) {
    std::fill_n(hidden.as<uint16_t>() + i * kHidden, kHidden, uint16_t{0x7fc0});
  }
  const auto masked =
      run_layer(owned.layer, hidden.view(), DType::kF32, {.padding_mask = mask.view()});
  for (int64_t token = 0; token < 12; ++token) {
    if (token % 3 != 0) {
      EXPECT_EQ(row_bytes(masked.out, token), row_bytes(expected.out, token));
      continue;
    }
    for (int64_t col = 0; col < kHidden; ++col) {
      EXPECT_EQ(masked.out.as<float>()[token * kHidden + col], 0.0F);
    }
    EXPECT_EQ(masked.ids.as<int32_t>()[token * 2], -1);
  }
}

TEST(Forward, NumTokens_LimitsWhatIsWritten) {
  const OwnedLayer owned = make_layer(spec_of());
  const Tensor hidden = random_tensor(DType::kF32, 6, kHidden, 1);
  const auto expected = run_layer(owned.layer, hidden.view(), DType::kF32);
  Tensor out(DType::kF32, {6, kHidden});
  std::fill_n(out.as<float>(), 6 * kHidden, 3.0F);
  const int64_t count = 4;
  owned.layer.forward({.hidden = hidden.view(), .num_tokens = &count, .out = out.view()});
  for (int64_t row = 0; row < 4; ++row)
    EXPECT_EQ(row_bytes(out, row), row_bytes(expected.out, row));
  for (int64_t i = 4 * kHidden; i < 6 * kHidden; ++i) EXPECT_EQ(out.as<float>()[i], 3.0F);
}

TEST(Forward, SharedOut_TakesTheSharedPartApart) {
  MoeSpec spec = spec_of(DType::kF32);
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 24};
  const OwnedLayer owned = make_layer(spec);
  const Tensor hidden = random_tensor(DType::kF32, 5, kHidden, 1);
  Tensor shared(DType::kF32, {5, kHidden});
  const auto routed =
      run_layer(owned.layer, hidden.view(), DType::kF32, {.shared_out = shared.view()});
  const ReferenceResult reference =
      reference_forward(*owned.context, spec, *owned.source, {.hidden = hidden.view()});
  const double bar = accuracy_bar(DType::kF32, DType::kF32);
  EXPECT_LE(worst(token_errors(shared.view(), reference.shared)), bar);
  EXPECT_LE(worst(token_errors(routed.out.view(), reference.routed)), bar);
}

TEST(Forward, ExpertLoad_CountsEverySlotAndAccumulates) {
  const OwnedLayer owned = make_layer(spec_of(), {.max_tokens = 4});
  const Tensor hidden = random_tensor(DType::kF32, 15, kHidden, 1);
  std::vector<int64_t> load(6, 100);
  const auto output = run_layer(owned.layer, hidden.view(), DType::kF32, {.expert_load = load});
  std::vector<int64_t> expected(6, 100);
  for (int i = 0; i < 30; ++i) ++expected[static_cast<size_t>(output.ids.as<int32_t>()[i])];
  EXPECT_EQ(load, expected);
}

TEST(Forward, DuplicateIds_Add) {
  const OwnedLayer owned = make_layer(spec_of(DType::kF32));
  const Tensor hidden = random_tensor(DType::kF32, 1, kHidden, 1);
  Tensor ids(DType::kI32, {1, 2});
  Tensor weights(DType::kF32, {1, 2});
  ids.as<int32_t>()[0] = ids.as<int32_t>()[1] = 4;
  weights.as<float>()[0] = 0.25F;
  weights.as<float>()[1] = 0.5F;
  const ForwardArgs routing{.topk_ids = ids.view(), .topk_weights = weights.view()};
  const auto twice = run_layer(owned.layer, hidden.view(), DType::kF32, routing);
  weights.as<float>()[0] = 0.75F;
  ids.as<int32_t>()[1] = -1;
  const auto once = run_layer(owned.layer, hidden.view(), DType::kF32, routing);
  std::vector<double> expected(once.out.as<float>(), once.out.as<float>() + kHidden);
  EXPECT_LE(worst(token_errors(twice.out.view(), expected)),
            accuracy_bar(DType::kF32, DType::kF32));
}

TEST(Forward, Timings_CoverTheStages) {
  const OwnedLayer owned = make_layer(spec_of());
  const Tensor hidden = random_tensor(DType::kF32, 15, kHidden, 1);
  StageTimings timings;
  run_layer(owned.layer, hidden.view(), DType::kF32, {.timings = &timings});
  EXPECT_GT(timings.experts_ns, 0);
  EXPECT_GE(timings.total_ns, timings.experts_ns + timings.combine_ns);
}

TEST(Forward, ConcurrentCallsWithOwnWorkspaces_AgreeWithSerialOnes) {
  const OwnedLayer owned = make_layer(spec_of());
  const Tensor hidden = random_tensor(DType::kBF16, 17, kHidden, 1);
  const auto expected = run_layer(owned.layer, hidden.view(), DType::kF32);
  std::vector<std::thread> threads;
  std::vector<int> mismatches(4, 0);
  for (size_t caller = 0; caller < mismatches.size(); ++caller) {
    threads.emplace_back([&, caller] {
      Workspace workspace(*owned.context, owned.layer.workspace_bytes());
      for (int repeat = 0; repeat < 50; ++repeat) {
        const auto output =
            run_layer(owned.layer, hidden.view(), DType::kF32, {.workspace = &workspace});
        mismatches[caller] += !same_bits(output.out, expected.out);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(mismatches, std::vector<int>(4, 0));
}

// Fails if two threads are in it at once.
class OneAtATime final : public Executor {
 public:
  int32_t concurrency() const noexcept override { return 2; }
  void run(ParallelTask task) override {
    EXPECT_EQ(inside_.fetch_add(1), 0);
    ++runs_;
    for (int32_t worker = 0; worker < 2; ++worker) task.invoke(task.state, worker);
    std::this_thread::yield();
    inside_ -= 1;
  }
  int runs() const { return runs_; }

 private:
  std::atomic<int> inside_{0};
  int runs_ = 0;
};

TEST(Forward, ConcurrentCallsOnAnApplicationsThreads_TakeTurns) {
  OneAtATime executor;
  const OwnedLayer owned = make_layer(spec_of(), {}, {.executor = &executor});
  const Tensor hidden = random_tensor(DType::kBF16, 7, kHidden, 1);
  const auto alone = run_layer(owned.layer, hidden.view(), DType::kF32);
  const int before = executor.runs();
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      Workspace workspace(*owned.context, owned.layer.workspace_bytes());
      for (int call = 0; call < 40; ++call) {
        const auto output =
            run_layer(owned.layer, hidden.view(), DType::kF32, {.workspace = &workspace});
        EXPECT_TRUE(same_bits(output.out, alone.out));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_GE(executor.runs() - before, 120);
}

TEST(Forward, OneWorkspaceForTwoLayers_GivesEachItsResult) {
  const OwnedLayer first = make_layer(spec_of(), {}, {}, 1);
  const OwnedLayer second = make_layer(make_spec(4, 3, 72, 24, DType::kF32), {}, {}, 2);
  const Tensor first_hidden = random_tensor(DType::kF32, 9, kHidden, 1);
  const Tensor second_hidden = random_tensor(DType::kF32, 9, 72, 2);
  const auto first_expected = run_layer(first.layer, first_hidden.view(), DType::kF32);
  const auto second_expected = run_layer(second.layer, second_hidden.view(), DType::kF32);
  Workspace shared(*first.context,
                   std::max(first.layer.workspace_bytes(), second.layer.workspace_bytes()));
  for (int repeat = 0; repeat < 3; ++repeat) {
    EXPECT_TRUE(same_bits(
        run_layer(first.layer, first_hidden.view(), DType::kF32, {.workspace = &shared}).out,
        first_expected.out));
    EXPECT_TRUE(same_bits(
        run_layer(second.layer, second_hidden.view(), DType::kF32, {.workspace = &shared}).out,
        second_expected.out));
  }
}

}  // namespace
}  // namespace conclave
