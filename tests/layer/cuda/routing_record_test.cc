// Rings in device memory: what forwards on a GPU have routed, recorded without a wait, also by
// graphs; the rows that a recorder of the host keeps; and replay in any batch.

#include "cuda/check.h"
#include "cuda/stream.h"
#include "device_layer.h"
#include "support/layer_parts.h"

#include "conclave/device_routing_record.h"
#include "conclave/interop/cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::CudaLayerTest;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::LayerOutput;
using testing::make_spec;
using testing::random_tensor;

constexpr int64_t kSlots = 3;
constexpr int64_t kIds = 9;

std::vector<RecordedLayer> two_layers() {
  return {{.layer = 7, .num_ids = kIds, .num_slots = kSlots, .spec_hash = 1},
          {.layer = 3, .num_ids = kIds, .num_slots = kSlots, .spec_hash = 2}};
}

// Rows that follow from a number, with a gap of poison behind each.
struct Rows {
  Tensor ids;
  Tensor weights;
  Tensor tokens;
  int64_t count = 0;

  static Rows of(int64_t first, int64_t count, DType id_dtype = DType::kI32) {
    Rows rows{.ids = Tensor(id_dtype, {std::max<int64_t>(count, 1), kSlots + 1}),
              .weights = Tensor(DType::kF32, {std::max<int64_t>(count, 1), kSlots + 2}),
              .tokens = Tensor(DType::kI64, {std::max<int64_t>(count, 1), 2}),
              .count = count};
    for (Tensor* tensor : {&rows.ids, &rows.weights}) {
      std::fill_n(tensor->as<std::byte>(), tensor->size_bytes(), std::byte{0xFF});
    }
    for (int64_t row = 0; row < count; ++row) {
      const int64_t n = first + row;
      rows.tokens.as<int64_t>()[row * 2] = n % 3;
      rows.tokens.as<int64_t>()[row * 2 + 1] = n;
      for (int64_t slot = 0; slot < kSlots; ++slot) {
        const int64_t id = (n + slot) % (kIds + 1) - 1;
        if (id_dtype == DType::kI64) {
          rows.ids.as<int64_t>()[row * (kSlots + 1) + slot] = id;
        } else {
          rows.ids.as<int32_t>()[row * (kSlots + 1) + slot] = static_cast<int32_t>(id);
        }
        rows.weights.as<float>()[row * (kSlots + 2) + slot] =
            static_cast<float>(n) + 0.25F * static_cast<float>(slot);
      }
    }
    return rows;
  }
  ConstTensorView cut(ConstTensorView view, int64_t columns) const {
    view.row_stride = view.shape[1];
    view.shape = {count, columns};
    return view;
  }
  std::vector<TokenKey> keys() const {
    std::vector<TokenKey> keys;
    for (int64_t row = 0; row < count; ++row) {
      keys.push_back({tokens.as<int64_t>()[row * 2], tokens.as<int64_t>()[row * 2 + 1]});
    }
    return keys;
  }
};

// Both recorders, given the same rows.
class Pair {
 public:
  Pair(const Context& context, RecorderOptions options)
      : device(context, two_layers(), options), host(two_layers(), options), queue(context) {}

  void record(const Rows& rows, bool has_keys, std::optional<int64_t> live = {}) {
    const DeviceTensor ids = queue.upload(rows.ids.const_view());
    const DeviceTensor weights = queue.upload(rows.weights.const_view());
    const DeviceTensor tokens = queue.upload(rows.tokens.const_view());
    Tensor number(DType::kI64, {1});
    number.as<int64_t>()[0] = live.value_or(0);
    DeviceTensor count = queue.upload(number.const_view());
    device.record(3,
                  {.topk_ids = rows.cut(ids.const_view(), kSlots),
                   .topk_weights = rows.cut(weights.const_view(), kSlots),
                   .tokens = has_keys ? rows.cut(tokens.const_view(), 2) : ConstTensorView(),
                   .num_tokens = live ? count.as<int64_t>() : nullptr},
                  queue.stream());
    queue.synchronize();
    const int64_t used = std::clamp<int64_t>(live.value_or(rows.count), 0, rows.count);
    const auto first = [&](ConstTensorView view, int64_t columns) {
      view = rows.cut(view, columns);
      view.shape = {used, columns};
      return view;
    };
    std::vector<TokenKey> keys = has_keys ? rows.keys() : std::vector<TokenKey>();
    if (has_keys) keys.resize(static_cast<size_t>(used));
    host.record(3, first(rows.ids.const_view(), kSlots), first(rows.weights.const_view(), kSlots),
                keys);
  }
  void expect_equal() const {
    const RoutingRecord actual = device.snapshot();
    const RoutingRecord expected = host.snapshot();
    ASSERT_EQ(actual.layers.size(), expected.layers.size());
    EXPECT_EQ(actual.model, expected.model);
    for (size_t i = 0; i < actual.layers.size(); ++i) {
      EXPECT_EQ(actual.layers[i].layer.layer, expected.layers[i].layer.layer);
      EXPECT_EQ(actual.layers[i].layer.spec_hash, expected.layers[i].layer.spec_hash);
      EXPECT_EQ(actual.layers[i].tokens, expected.layers[i].tokens);
      EXPECT_EQ(actual.layers[i].topk_ids, expected.layers[i].topk_ids);
      EXPECT_EQ(actual.layers[i].topk_weights, expected.layers[i].topk_weights);
      EXPECT_EQ(actual.layers[i].dropped_tokens, expected.layers[i].dropped_tokens);
    }
    EXPECT_EQ(device.recorded_tokens(3), host.recorded_tokens(3));
    EXPECT_EQ(device.dropped_tokens(3), host.dropped_tokens(3));
  }

  DeviceRoutingRecorder device;
  RoutingRecorder host;
  DeviceQueue queue;
};

class CudaRoutingRecord : public CudaLayerTest {
 protected:
  void SetUp() override {
    CudaLayerTest::SetUp();
    if (!IsSkipped()) context_.emplace(ContextOptions{.device = "cuda:0", .num_threads = 1});
  }
  std::optional<Context> context_;
};

TEST_F(CudaRoutingRecord, RandomCalls_LeaveTheRowsThatTheHostKeeps) {
  for (const WhenFull when_full : {WhenFull::kDropOldest, WhenFull::kDropNewest}) {
    for (uint32_t seed = 0; seed < 12; ++seed) {
      std::mt19937 generator(seed);
      const int64_t capacity = 1 + static_cast<int64_t>(generator() % 40);
      SCOPED_TRACE("capacity " + std::to_string(capacity) + ", seed " + std::to_string(seed));
      Pair pair(*context_, {.capacity = capacity, .when_full = when_full, .model = "m"});
      pair.expect_equal();
      int64_t first = 0;
      for (int call = 0; call < 6; ++call) {
        const auto count = static_cast<int64_t>(generator() % 60);
        const Rows rows = Rows::of(first, count, call % 2 == 0 ? DType::kI32 : DType::kI64);
        std::optional<int64_t> live;
        if (call % 3 == 2) live = static_cast<int64_t>(generator() % 80) - 10;
        pair.record(rows, call % 4 != 1, live);
        first += count;
        pair.expect_equal();
      }
      pair.device.clear();
      pair.host.clear();
      pair.record(Rows::of(5, 2), false);
      pair.expect_equal();
      if (HasFailure()) return;
    }
  }
  Pair large(*context_, {.capacity = 30000});
  for (const int64_t count : {20000, 9000, 25000}) {
    large.record(Rows::of(count, count), true);
    large.expect_equal();
  }
}

TEST_F(CudaRoutingRecord, ACallThatDoesNotFit_RecordsNothingAndIsToldWhenRead) {
  Pair pair(*context_, {.capacity = 5, .when_full = WhenFull::kError});
  pair.record(Rows::of(0, 3), true);
  pair.record(Rows::of(3, 2), true);
  pair.expect_equal();
  EXPECT_EQ(code_of([&] { pair.record(Rows::of(5, 1), true); }), ErrorCode::kState)
      << "that of the host";
  EXPECT_EQ(code_of([&] { static_cast<void>(pair.device.snapshot()); }), ErrorCode::kState);
  EXPECT_EQ(code_of([&] { pair.device.dropped_tokens(3); }), ErrorCode::kState);
  EXPECT_EQ(pair.device.recorded_tokens(7), 0) << "other layers are as they were";
  pair.device.clear();
  pair.host.clear();
  pair.record(Rows::of(0, 5), true);
  pair.expect_equal();
}

TEST_F(CudaRoutingRecord, AnIdThatTheLayerHasNot_IsToldWithItsPlace) {
  for (const int32_t bad : {-2, 9, std::numeric_limits<int32_t>::max()}) {
    Pair pair(*context_, {.capacity = 16});
    pair.record(Rows::of(0, 6), true);
    Rows rows = Rows::of(6, 4);
    rows.ids.as<int32_t>()[2 * (kSlots + 1) + 1] = bad;
    rows.ids.as<int32_t>()[3 * (kSlots + 1)] = bad;
    EXPECT_EQ(code_of([&] { pair.record(rows, true); }), ErrorCode::kExpertId) << "of the host";
    try {
      static_cast<void>(pair.device.snapshot());
      ADD_FAILURE() << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kExpertId);
      const std::string text = error.what();
      EXPECT_NE(text.find("layer 3 has not, at token 8"), std::string::npos) << text;
      EXPECT_NE(text.find("slot 1"), std::string::npos) << text;
    }
  }
}

TEST_F(CudaRoutingRecord, WhatCannotBe_IsRefusedAndChangesNothing) {
  DeviceRoutingRecorder recorder(*context_, two_layers(), {.capacity = 4});
  const DeviceQueue queue(*context_);
  const DeviceTensor ids = queue.upload(Tensor(DType::kI32, {2, kSlots}).const_view());
  const DeviceTensor weights = queue.upload(Tensor(DType::kF32, {2, kSlots}).const_view());
  const DeviceTensor tokens = queue.upload(Tensor(DType::kI64, {2, 2}).const_view());
  const Tensor on_host(DType::kF32, {2, kSlots});
  const int64_t count = 2;
  const auto refusal = [&](const auto& change, int64_t layer = 3) -> std::string {
    DeviceRoutingRows rows{.topk_ids = ids.const_view(),
                           .topk_weights = weights.const_view(),
                           .tokens = tokens.const_view()};
    Stream stream = queue.stream();
    change(rows, stream);
    try {
      recorder.record(layer, rows, stream);
    } catch (const Error& error) {
      return std::string(to_string(error.code())) + " " + error.detail().tensor;
    }
    return "taken";
  };
  using Args = DeviceRoutingRows;
  EXPECT_EQ(refusal([](Args&, Stream&) {}, 4), "kInvalidArgument layer");
  EXPECT_EQ(refusal([](Args&, Stream& stream) { stream = {}; }), "kNullPointer stream");
  EXPECT_EQ(refusal([](Args& args, Stream&) { args.topk_ids.dtype = DType::kF32; }),
            "kDType topk_ids");
  EXPECT_EQ(refusal([](Args& args, Stream&) { args.topk_ids.shape = {2, 2}; }), "kShape topk_ids");
  EXPECT_EQ(refusal([](Args& args, Stream&) {
              args.topk_weights.shape = {1, kSlots};
            }),
            "kShape topk_weights");
  EXPECT_EQ(refusal([](Args& args, Stream&) { args.tokens.shape = {2, 3}; }), "kShape tokens");
  EXPECT_EQ(refusal([&](Args& args, Stream&) { args.topk_weights = on_host.const_view(); }),
            "kDevice topk_weights");
  EXPECT_EQ(refusal([&](Args& args, Stream&) { args.num_tokens = &count; }), "kDevice num_tokens");
  EXPECT_EQ(recorder.recorded_tokens(3), 0);

  const Context host({.num_threads = 1});
  EXPECT_EQ(code_of([&] { DeviceRoutingRecorder(host, two_layers()); }), ErrorCode::kUnsupported);
  EXPECT_EQ(code_of([&] { DeviceRoutingRecorder(*context_, two_layers(), {.capacity = 0}); }),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] {
              DeviceRoutingRecorder(*context_, two_layers(), {.capacity = int64_t{1} << 40});
            }),
            ErrorCode::kOutOfMemory);
}

std::vector<TokenKey> keys_of(const std::vector<int64_t>& rows) {
  std::vector<TokenKey> keys;
  for (const int64_t row : rows) keys.push_back({.sequence = row % 4, .position = row / 4});
  return keys;
}

Tensor key_tensor(const std::vector<TokenKey>& keys) {
  Tensor tensor(DType::kI64, {std::ssize(keys), 2});
  for (size_t i = 0; i < keys.size(); ++i) {
    tensor.as<int64_t>()[2 * i] = keys[i].sequence;
    tensor.as<int64_t>()[2 * i + 1] = keys[i].position;
  }
  return tensor;
}

// A server records on its GPU; a trainer reads the file and has the same tokens in other batches.
TEST_F(CudaRoutingRecord, AnyBatch_ReplaysWithTheBitsOfTheForwardThatWasRecorded) {
  constexpr int64_t kTokens = 23;
  const std::filesystem::path file =
      std::filesystem::path(::testing::TempDir()) / "device_routing_record.safetensors";
  std::vector<int64_t> all(kTokens);
  std::iota(all.begin(), all.end(), 0);
  for (uint32_t seed = 900; seed < 920; ++seed) {
    const MoeSpec spec = testing::SpecDraw(seed).draw();
    if (spec.shared.mode == SharedMode::kRouterWeight) continue;  // its weights are more than k
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + testing::parts_text(spec));
    const Determinism invariant = Determinism::kBatchInvariant;
    DeviceLayer server(spec, {.max_tokens = 16, .determinism = invariant});
    DeviceLayer trainer(spec, {.max_tokens = 16, .determinism = invariant});
    const Tensor hidden = random_tensor(spec.weight_dtype, kTokens, spec.hidden_size, seed);
    DeviceRoutingRecorder recorder(server.context, std::vector{RecordedLayer::of(2, spec)});
    DeviceForward forward(server, hidden.view(), DType::kF32);
    forward.capture_routing();
    const DeviceTensor tokens = server.queue.upload(key_tensor(keys_of(all)).const_view());
    forward.enqueue();
    recorder.record(2,
                    {.topk_ids = forward.args.captured_ids,
                     .topk_weights = forward.args.captured_weights,
                     .tokens = tokens.const_view()},
                    server.queue.stream());
    const LayerOutput served = forward.output();
    recorder.write(file);
    const RoutingReplay replay(RoutingRecord::open(file));

    std::vector<int64_t> rows = all;
    std::shuffle(rows.begin(), rows.end(), std::mt19937(seed));
    rows.resize(kTokens / 2);
    const auto count = std::ssize(rows);
    testing::GivenRouting routing{.ids = Tensor(DType::kI32, {count, num_slots(spec)}),
                                  .weights = Tensor(DType::kF32, {count, num_slots(spec)})};
    replay.find(2, keys_of(rows), routing.ids.view(), routing.weights.view());
    DeviceForward trained(trainer, testing::gather_rows(hidden, rows).view(), DType::kF32);
    trained.route_by(routing.ids, routing.weights);
    trained.enqueue();
    EXPECT_TRUE(testing::same_bits(trained.out(), testing::gather_rows(served.out, rows)));
    if (HasFailure()) break;
  }
  std::filesystem::remove(file);
}

// One graph of two layers; each replay records its live rows under keys that are in device memory.
TEST_F(CudaRoutingRecord, EachReplayOfAGraph_RecordsItsOwnRows) {
  const MoeSpec spec = make_spec(12, 3, 256, 128, DType::kBF16);
  DeviceLayer owned(spec, {.max_tokens = 16});
  constexpr int64_t kRows = 8;
  const std::vector layers = {RecordedLayer::of(0, spec), RecordedLayer::of(1, spec)};
  DeviceRoutingRecorder recorder(owned.context, layers, {.capacity = 100});
  RoutingRecorder expected(layers, {.capacity = 100});
  DeviceForward forward(owned, random_tensor(DType::kBF16, kRows, 256, 1).view(), DType::kF32);
  forward.capture_routing();
  DeviceTensor tokens = owned.queue.upload(Tensor(DType::kI64, {kRows, 2}).const_view());
  DeviceTensor live = owned.queue.upload(Tensor(DType::kI64, {1}).const_view());
  forward.args.num_tokens = live.as<int64_t>();
  const DeviceRoutingRows rows{.topk_ids = forward.args.captured_ids,
                               .topk_weights = forward.args.captured_weights,
                               .tokens = tokens.const_view(),
                               .num_tokens = live.as<int64_t>()};
  cudaStream_t const stream = to_cuda(owned.queue.stream());
  const cuda::OwnedGraph graph = cuda::capture(stream, [&] {
    for (const int64_t layer : {0, 1}) {
      forward.enqueue();
      recorder.record(layer, rows, owned.queue.stream());
    }
  });
  EXPECT_EQ(recorder.recorded_tokens(0), 0) << "a capture runs nothing";
  int64_t next = 0;
  for (const int64_t count : {8, 3, 0, 5, 8}) {
    std::vector<int64_t> numbers(kRows);
    std::iota(numbers.begin(), numbers.end(), next);
    std::vector<TokenKey> keys = keys_of(numbers);
    Tensor number(DType::kI64, {1});
    number.as<int64_t>()[0] = count;
    owned.queue.upload(number.const_view(), live.view());
    owned.queue.upload(key_tensor(keys).const_view(), tokens.view());
    owned.queue.upload(
        random_tensor(DType::kBF16, kRows, 256, static_cast<uint64_t>(next) + 2).const_view(),
        forward.hidden().view());
    cuda::check(cudaGraphLaunch(graph.get(), stream), "cudaGraphLaunch");
    const LayerOutput output = forward.output();
    keys.resize(static_cast<size_t>(count));
    const auto first = [&](ConstTensorView view) {
      view.shape = {count, view.shape[1]};
      return view;
    };
    for (const int64_t layer : {0, 1}) {
      expected.record(layer, first(output.ids.const_view()), first(output.weights.const_view()),
                      keys);
    }
    next += count;
  }
  const RoutingComparison found = compare_routing(recorder.snapshot(), expected.snapshot());
  EXPECT_TRUE(found.equal());
  EXPECT_EQ(recorder.recorded_tokens(1), 24);
}

}  // namespace
}  // namespace conclave
