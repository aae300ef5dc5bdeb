// RoutingRecorder: rings that hold what they were given, drop by rule, and serve several threads.
#include "support/layer_fixture.h"

#include "conclave/routing_record.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;

constexpr int64_t kSlots = 2;

// Rows whose ids and weights follow from a number.
struct Rows {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<TokenKey> tokens;

  static Rows of(int64_t first, int64_t count) {
    Rows rows;
    for (int64_t n = first; n < first + count; ++n) {
      rows.tokens.push_back({.sequence = n % 3, .position = n});
      for (int64_t slot = 0; slot < kSlots; ++slot) {
        rows.ids.push_back(static_cast<int32_t>((n + slot) % 8));
        rows.weights.push_back(static_cast<float>(n) + 0.25F * static_cast<float>(slot));
      }
    }
    return rows;
  }
  int64_t count() const { return std::ssize(tokens); }
  ConstTensorView id_view() const {
    return {.data = ids.data(), .dtype = DType::kI32, .shape = {count(), kSlots}};
  }
  ConstTensorView weight_view() const {
    return {.data = weights.data(), .dtype = DType::kF32, .shape = {count(), kSlots}};
  }
};

std::vector<RecordedLayer> two_layers() {
  return {{.layer = 7, .num_ids = 8, .num_slots = kSlots, .spec_hash = 1},
          {.layer = 3, .num_ids = 8, .num_slots = kSlots, .spec_hash = 1}};
}

void expect_rows(const RecordedRows& found, const Rows& expected) {
  EXPECT_EQ(found.tokens, expected.tokens);
  EXPECT_EQ(found.topk_ids, expected.ids);
  EXPECT_EQ(found.topk_weights, expected.weights);
}

TEST(RoutingRecorder, Rows_AreKeptByLayerInOrder) {
  RoutingRecorder recorder(two_layers(), {.capacity = 10, .model = "m", .model_type = "t"});
  for (const int64_t first : {0, 4}) {
    const Rows rows = Rows::of(first, 4);
    recorder.record(3, rows.id_view(), rows.weight_view(), rows.tokens);
  }
  recorder.record(7, Rows::of(0, 0).id_view(), Rows::of(0, 0).weight_view());
  const RoutingRecord record = recorder.snapshot();
  EXPECT_EQ(record.model, "m");
  EXPECT_EQ(record.model_type, "t");
  ASSERT_EQ(record.layers.size(), 2U);
  EXPECT_EQ(record.layers[0].layer.layer, 3);
  expect_rows(record.layers[0], Rows::of(0, 8));
  EXPECT_EQ(record.layers[1].num_tokens(), 0);
  EXPECT_EQ(recorder.recorded_tokens(3), 8);
  EXPECT_EQ(recorder.dropped_tokens(3), 0);
  recorder.clear();
  EXPECT_EQ(recorder.snapshot().layers[0].num_tokens(), 0);
  EXPECT_EQ(recorder.recorded_tokens(3), 0);
}

TEST(RoutingRecorder, AFullRing_DropsByRule) {
  const auto filled = [](WhenFull when_full, std::vector<int64_t> calls) {
    auto recorder = std::make_unique<RoutingRecorder>(
        two_layers(), RecorderOptions{.capacity = 5, .when_full = when_full});
    int64_t first = 0;
    for (const int64_t count : calls) {
      const Rows rows = Rows::of(first, count);
      recorder->record(3, rows.id_view(), rows.weight_view(), rows.tokens);
      first += count;
    }
    return recorder;
  };
  for (const std::vector<int64_t>& calls :
       {std::vector<int64_t>{12}, {5, 7}, {4, 4, 4}, {1, 1, 9, 1}}) {
    const auto oldest = filled(WhenFull::kDropOldest, calls);
    expect_rows(oldest->snapshot().layers[0], Rows::of(7, 5));
    EXPECT_EQ(oldest->dropped_tokens(3), 7);
    EXPECT_EQ(oldest->snapshot().layers[0].dropped_tokens, 7);
    const auto newest = filled(WhenFull::kDropNewest, calls);
    expect_rows(newest->snapshot().layers[0], Rows::of(0, 5));
    EXPECT_EQ(newest->dropped_tokens(3), 7);
    EXPECT_EQ(code_of([&] { filled(WhenFull::kError, calls); }), ErrorCode::kState);
  }
  const auto exact = filled(WhenFull::kError, {2, 3});
  const Rows one = Rows::of(5, 1);
  EXPECT_EQ(code_of([&] { exact->record(3, one.id_view(), one.weight_view(), one.tokens); }),
            ErrorCode::kState);
  expect_rows(exact->snapshot().layers[0], Rows::of(0, 5));
}

TEST(RoutingRecorder, WithoutKeys_TokensAreNumberedOn) {
  RoutingRecorder recorder(two_layers(), {.capacity = 4});
  for (int call = 0; call < 2; ++call) {
    const Rows rows = Rows::of(0, 3);
    recorder.record(3, rows.id_view(), rows.weight_view());
  }
  const std::vector<TokenKey> expected = {{0, 2}, {0, 3}, {0, 4}, {0, 5}};
  EXPECT_EQ(recorder.snapshot().layers[0].tokens, expected);
}

TEST(RoutingRecorder, RowsThatAreApart_AndLongIds_AreRead) {
  RoutingRecorder recorder(two_layers());
  const std::vector<int64_t> ids = {1, 2, 99, 3, -1, 99};
  const std::vector<float> weights = {0.5F, 0.25F, -9, 0.125F, 0, -9};
  recorder.record(3, {.data = ids.data(), .dtype = DType::kI64, .shape = {2, 2}, .row_stride = 3},
                  {.data = weights.data(), .dtype = DType::kF32, .shape = {2, 2}, .row_stride = 3});
  const RoutingRecord record = recorder.snapshot();
  EXPECT_EQ(record.layers[0].topk_ids, (std::vector<int32_t>{1, 2, 3, -1}));
  EXPECT_EQ(record.layers[0].topk_weights, (std::vector<float>{0.5F, 0.25F, 0.125F, 0}));
}

TEST(RoutingRecorder, WhatCannotBe_IsRefusedAndChangesNothing) {
  RoutingRecorder recorder(two_layers(), {.capacity = 4});
  const Rows rows = Rows::of(0, 2);
  const auto code = [&](int64_t layer, ConstTensorView ids, ConstTensorView weights,
                        std::span<const TokenKey> tokens) {
    return code_of([&] { recorder.record(layer, ids, weights, tokens); });
  };
  using enum ErrorCode;
  EXPECT_EQ(code(4, rows.id_view(), rows.weight_view(), {}), kInvalidArgument);
  const std::vector<TokenKey> one(1);
  EXPECT_EQ(code(3, rows.id_view(), rows.weight_view(), one), kShape);
  EXPECT_EQ(code(3, rows.id_view(), Rows::of(0, 1).weight_view(), {}), kShape);
  EXPECT_EQ(code(3, rows.weight_view(), rows.weight_view(), {}), kDType);
  EXPECT_EQ(code(3, rows.id_view(), rows.id_view(), {}), kDType);
  ConstTensorView narrow = rows.id_view();
  narrow.row_stride = 1;
  EXPECT_EQ(code(3, narrow, rows.weight_view(), {}), kStride);
  ConstTensorView nothing = rows.id_view();
  nothing.data = nullptr;
  EXPECT_EQ(code(3, nothing, rows.weight_view(), {}), kNullPointer);
  for (const int32_t id : {-2, 8}) {
    Rows wrong = rows;
    wrong.ids[3] = id;
    EXPECT_EQ(code(3, wrong.id_view(), rows.weight_view(), {}), kExpertId);
  }
  EXPECT_EQ(recorder.recorded_tokens(3), 0);
  const auto made = [](std::vector<RecordedLayer> layers, int64_t capacity) {
    return code_of([&] { RoutingRecorder(layers, {.capacity = capacity}); });
  };
  EXPECT_EQ(made(two_layers(), 0), kInvalidArgument);
  EXPECT_EQ(made(two_layers(), (int64_t{1} << 40) + 1), kInvalidArgument);
  EXPECT_EQ(made({two_layers()[0], two_layers()[0]}, 1), kInvalidArgument);
  EXPECT_EQ(made({{.layer = -1, .num_ids = 8, .num_slots = 2}}, 1), kInvalidArgument);
  EXPECT_EQ(made({{.layer = 1, .num_ids = 8, .num_slots = 0}}, 1), kInvalidArgument);
  EXPECT_EQ(made({{.layer = 1, .num_ids = 8, .num_slots = 65537}}, 1), kInvalidArgument);
  EXPECT_EQ(made({{.layer = 1, .num_ids = 0, .num_slots = 1}}, 1), kInvalidArgument);
}

// Each thread has a sequence of its own; every row must come out whole and once.
TEST(RoutingRecorder, Threads_LoseNoRow) {
  constexpr int64_t kThreads = 4;
  constexpr int64_t kCalls = 40;
  RoutingRecorder recorder(two_layers(), {.capacity = kThreads * kCalls * 3});
  std::vector<std::thread> threads;
  for (int64_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int64_t call = 0; call < kCalls; ++call) {
        Rows rows = Rows::of(call * 3, 3);
        for (TokenKey& token : rows.tokens) token.sequence = thread;
        recorder.record(thread % 2 == 0 ? 3 : 7, rows.id_view(), rows.weight_view(), rows.tokens);
      }
    });
  }
  threads.emplace_back([&] {
    for (int i = 0; i < 20; ++i) EXPECT_LE(recorder.snapshot().layers[0].num_tokens(), 240);
  });
  for (std::thread& thread : threads) thread.join();
  for (const RecordedRows& rows : recorder.snapshot().layers) {
    ASSERT_EQ(rows.num_tokens(), kThreads / 2 * kCalls * 3);
    std::vector<int64_t> next(kThreads);
    for (size_t row = 0; row < rows.tokens.size(); ++row) {
      const TokenKey& token = rows.tokens[row];
      ASSERT_EQ(token.position, next[static_cast<size_t>(token.sequence)]++);
      ASSERT_EQ(rows.topk_weights[row * kSlots], static_cast<float>(token.position));
    }
  }
}

TEST(RecordedLayer, ASpec_HasAHashOfItsOwn) {
  const MoeSpec spec = testing::make_spec(8, 2, 16, 8, DType::kBF16);
  const RecordedLayer layer = RecordedLayer::of(5, spec);
  EXPECT_EQ(layer.layer, 5);
  EXPECT_EQ(layer.num_slots, 2);
  EXPECT_EQ(layer.num_ids, 8);
  EXPECT_EQ(RecordedLayer::of(6, spec).spec_hash, layer.spec_hash);
  MoeSpec other = spec;
  other.router.scale = 2;
  EXPECT_NE(RecordedLayer::of(5, other).spec_hash, layer.spec_hash);
}

TEST(RecordedLayer, ZeroExpertsAndSharedExpertsWithSlots_HaveIds) {
  MoeSpec spec = testing::make_spec(8, 2, 16, 8, DType::kBF16);
  spec.num_zero_experts = 3;
  EXPECT_EQ(RecordedLayer::of(0, spec).num_ids, 11);
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 8};
  EXPECT_EQ(RecordedLayer::of(0, spec).num_ids, 11);
  EXPECT_EQ(RecordedLayer::of(0, spec).num_slots, 2);
  spec.shared = {.mode = SharedMode::kFusedSlots, .intermediate_size = 8, .count = 2};
  EXPECT_EQ(RecordedLayer::of(0, spec).num_ids, 13);
  EXPECT_EQ(RecordedLayer::of(0, spec).num_slots, 4);
}

}  // namespace
}  // namespace conclave
