// Arguments that a forward on a GPU refuses, by code and by name, and those of any shape that it
// takes.

#include "device_layer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::CudaLayerTest;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::make_spec;
using testing::random_tensor;

class CudaArguments : public CudaLayerTest {};

TEST_F(CudaArguments, MissingStreamTimingsAndHostMemory_AreRefused) {
  DeviceLayer owned(make_spec(8, 2, 128, 64, DType::kBF16), {.max_tokens = 64});
  const Tensor hidden = random_tensor(DType::kBF16, 4, 128, 5);
  const auto refusal = [&](const auto& change) {
    DeviceForward forward(owned, hidden.view(), DType::kBF16);
    change(forward.args);
    return code_of([&] { forward.enqueue(); });
  };
  StageTimings timings;
  Workspace host_workspace(owned.host, owned.layer.workspace_bytes());
  EXPECT_EQ(refusal([](ForwardArgs& args) { args.stream = {}; }), ErrorCode::kNullPointer);
  EXPECT_EQ(refusal([&](ForwardArgs& args) { args.timings = &timings; }), ErrorCode::kUnsupported);
  EXPECT_EQ(refusal([&](ForwardArgs& args) { args.hidden = hidden.const_view(); }),
            ErrorCode::kDevice);
  EXPECT_EQ(refusal([&](ForwardArgs& args) { args.workspace = &host_workspace; }),
            ErrorCode::kDevice);
  EXPECT_EQ(refusal([](ForwardArgs& args) { args.hidden.shape = {4, 127}; }), ErrorCode::kShape);
}

// One argument at a time is host memory: it is refused by name, and nothing is written.
TEST_F(CudaArguments, EachHostPointer_IsRefusedByName) {
  MoeSpec spec = make_spec(8, 2, 128, 64, DType::kBF16);
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 64};
  DeviceLayer owned(spec, {.max_tokens = 64});
  const Tensor hidden = random_tensor(DType::kBF16, 4, 128, 5);
  const Tensor logits = random_tensor(DType::kF32, 4, 8, 5);
  testing::GivenRouting routing = testing::random_routing(4, 8, 2, 9);
  Tensor mask(DType::kBool, {4});
  Tensor rows(DType::kF32, {4, 128});
  Tensor wide(DType::kF32, {4, 8});
  Tensor slots(DType::kF32, {4, 2});
  Tensor ids(DType::kI32, {4, 2});
  Tensor bf16_rows(DType::kBF16, {4, 128});
  std::vector<int64_t> load(8);
  const int64_t count = 4;
  const auto check = [&](const char* name, bool given, const auto& change) {
    DeviceForward forward(owned, hidden.view(), DType::kBF16);
    if (given) forward.route_by(routing.ids, routing.weights);
    change(forward.args);
    try {
      forward.enqueue();
      ADD_FAILURE() << name << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDevice) << error.what();
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
    const Tensor out = forward.out();
    const std::vector<std::byte> poison(out.size_bytes(), std::byte{0xFF});
    EXPECT_EQ(std::memcmp(out.as<std::byte>(), poison.data(), poison.size()), 0) << name;
  };
  using Args = ForwardArgs;
  check("hidden", false, [&](Args& args) { args.hidden = hidden.const_view(); });
  check("router_logits", false, [&](Args& args) { args.router_logits = logits.const_view(); });
  check("topk_ids", true, [&](Args& args) { args.topk_ids = routing.ids.const_view(); });
  check("topk_weights", true,
        [&](Args& args) { args.topk_weights = routing.weights.const_view(); });
  check("router_input", false, [&](Args& args) { args.router_input = hidden.const_view(); });
  check("padding_mask", false, [&](Args& args) { args.padding_mask = mask.const_view(); });
  check("num_tokens", false, [&](Args& args) { args.num_tokens = &count; });
  check("out", false, [&](Args& args) { args.out = bf16_rows.view(); });
  check("shared_out", false, [&](Args& args) { args.shared_out = rows.view(); });
  check("captured_logits", false, [&](Args& args) { args.captured_logits = wide.view(); });
  check("captured_ids", false, [&](Args& args) { args.captured_ids = ids.view(); });
  check("captured_weights", false, [&](Args& args) { args.captured_weights = slots.view(); });
  check("expert_load", false, [&](Args& args) { args.expert_load = load; });
}

TEST_F(CudaArguments, HostMemoryAsWorkspaceOrWeights_IsRefused) {
  const Context context({.device = "cuda:0", .num_threads = 1});
  std::vector<std::byte> memory(8192);
  auto* const aligned =
      reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
  EXPECT_EQ(code_of([&] {
              const Workspace workspace(context, {aligned, 4096});
            }),
            ErrorCode::kDevice);

  MoeSpec spec = make_spec(4, 2, 128, 64, DType::kBF16);
  spec.has_gate = false;
  const Tensor gate_up(DType::kBF16, {4, 128, 128});
  const Tensor down(DType::kBF16, {4, 128, 64});
  const DeviceQueue queue(context);
  const DeviceTensor device_gate_up = queue.upload(gate_up.view());
  const auto source = make_pointer_source({.gate_up = device_gate_up.const_view(),
                                           .down = down.const_view(),
                                           .memory = MemoryKind::kDevice});
  try {
    const MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_tokens = 64});
    ADD_FAILURE() << "host memory was taken for device memory";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDevice) << error.what();
    EXPECT_NE(std::string(error.what()).find("down"), std::string::npos) << error.what();
  }
}

// Rows may start at any multiple of an element and lie any distance apart; gaps stay unchanged.
TEST_F(CudaArguments, OddStridesAndAddresses_GiveTheSameBits) {
  for (const testing::NumberForm& form : testing::number_forms()) {
    for (const auto& [top_k, tokens] : {std::pair<int64_t, int64_t>{2, 1},
                                        {2, 5},
                                        {2, 40},
                                        {2, 100},
                                        {1, 3},
                                        {1, 60},
                                        {1, 900}}) {
      const MoeSpec spec = testing::with_form(make_spec(8, top_k, 136, 72, form.dtype), form);
      DeviceLayer owned(spec, {.max_tokens = tokens == 100 ? 64 : 900});
      const DType dtype = testing::row_dtype(form);
      SCOPED_TRACE(::testing::Message() << form.name << " k" << top_k << " T" << tokens);
      const Tensor hidden = random_tensor(dtype, tokens, 136, 5);
      const testing::GivenRouting routing = testing::random_routing(tokens, 8, top_k, 9);
      DeviceForward dense(owned, hidden.view(), dtype);
      dense.route_by(routing.ids, routing.weights);
      dense.enqueue();
      const Tensor expected = dense.out();

      // The data starts one element in, with rows 139 elements apart.
      constexpr int64_t kStride = 139;
      Tensor apart(dtype, {tokens, kStride});
      for (int64_t row = 0; row < tokens; ++row) {
        std::memcpy(apart.as<uint16_t>() + row * kStride + 1, hidden.as<uint16_t>() + row * 136,
                    136 * sizeof(uint16_t));
      }
      const DeviceTensor rows = owned.queue.upload(apart.view());
      DeviceTensor out = owned.queue.allocate(dtype, {tokens, kStride});
      owned.queue.fill(out.view(), 0xFF);
      dense.args.hidden = {
          static_cast<const uint16_t*>(rows.const_view().data) + 1, dtype, {tokens, 136}, kStride};
      dense.args.out = {out.as<uint16_t>() + 1, dtype, {tokens, 136}, kStride};
      dense.enqueue();
      Tensor written(dtype, {tokens, kStride});
      owned.queue.download(out.const_view(), written.view());
      for (int64_t row = 0; row < tokens; ++row) {
        const uint16_t* const begin = written.as<uint16_t>() + row * kStride;
        EXPECT_EQ(std::memcmp(begin + 1, expected.as<uint16_t>() + row * 136, 272), 0) << row;
        for (const int64_t col : {0, 137, 138}) EXPECT_EQ(begin[col], 0xFFFF) << row << " " << col;
      }
    }
  }
}

// Captures may have rows any distance apart; their gaps stay unchanged. The logits are the gate's,
// or the caller's.
TEST_F(CudaArguments, CapturesWithWideRows_HoldWhatDenseOnesHold) {
  constexpr int64_t kGap = 3;
  DeviceLayer owned(make_spec(8, 2, 128, 64, DType::kBF16), {.max_tokens = 64});
  const Tensor logits = random_tensor(DType::kF32, 100, 8, 7);
  for (const int64_t tokens : {1, 5, 40, 100}) {
    for (const bool given : {false, true}) {
      if (given && tokens != 100) continue;
      const Tensor hidden = random_tensor(DType::kBF16, tokens, 128, 5);
      DeviceForward forward(owned, hidden.view(), DType::kBF16);
      if (given) forward.route_by_logits(logits);
      forward.capture_routing();
      forward.enqueue();
      const testing::LayerOutput dense = forward.output();

      const auto wide = [&](DType dtype, int64_t columns) {
        DeviceTensor memory = owned.queue.allocate(dtype, {tokens, columns + kGap});
        owned.queue.fill(memory.view(), 0xFF);
        return memory;
      };
      const auto rows_of = [&](DeviceTensor& memory, int64_t columns) {
        return TensorView{
            memory.view().data, memory.view().dtype, {tokens, columns}, columns + kGap};
      };
      DeviceTensor wide_logits = wide(DType::kF32, 8);
      DeviceTensor ids = wide(DType::kI32, 2);
      DeviceTensor weights = wide(DType::kF32, 2);
      forward.args.captured_logits = rows_of(wide_logits, 8);
      forward.args.captured_ids = rows_of(ids, 2);
      forward.args.captured_weights = rows_of(weights, 2);
      forward.enqueue();
      EXPECT_TRUE(testing::same_bits(forward.out(), dense.out));
      const auto expect_rows = [&](const DeviceTensor& memory, const Tensor& wanted) {
        const int64_t columns = wanted.shape()[1];
        Tensor written(memory.view().dtype, {tokens, columns + kGap});
        owned.queue.download(memory.const_view(), written.view());
        for (int64_t row = 0; row < tokens; ++row) {
          const uint32_t* const begin = written.as<uint32_t>() + row * (columns + kGap);
          EXPECT_EQ(std::memcmp(begin, wanted.as<uint32_t>() + row * columns,
                                static_cast<size_t>(columns) * sizeof(uint32_t)),
                    0)
              << "T" << tokens << " row " << row;
          for (int64_t gap = 0; gap < kGap; ++gap) EXPECT_EQ(begin[columns + gap], 0xFFFFFFFFU);
        }
      };
      expect_rows(wide_logits, dense.logits);
      expect_rows(ids, dense.ids);
      expect_rows(weights, dense.weights);
    }
  }
}

// Ids that come without weights are checked before the router weighs them.
TEST_F(CudaArguments, IdsToWeighOutOfRange_ContributeNothingAndAreCounted) {
  DeviceLayer owned(make_spec(8, 2, 128, 64, DType::kBF16), {.max_tokens = 64});
  for (const int64_t tokens : {4, 40}) {
    const Tensor hidden = random_tensor(DType::kBF16, tokens, 128, 5);
    testing::GivenRouting routing = testing::random_routing(tokens, 8, 2, 9);
    auto* const ids = routing.ids.as<int32_t>();
    const auto run = [&] {
      const int64_t before = owned.layer.status().skipped_ids;
      DeviceForward forward(owned, hidden.view(), DType::kBF16);
      forward.route_by(routing.ids, routing.weights);
      forward.args.topk_weights = {};
      forward.enqueue();
      Tensor out = forward.out();
      return std::pair(std::move(out), owned.layer.status().skipped_ids - before);
    };
    for (const int64_t slot : {0, 3, 5, 6}) ids[slot] = -1;
    const auto [expected, none] = run();
    EXPECT_EQ(none, 0);
    ids[3] = 8;
    ids[5] = std::numeric_limits<int32_t>::max();
    ids[6] = std::numeric_limits<int32_t>::min();
    const auto [out, skipped] = run();
    EXPECT_TRUE(testing::same_bits(out, expected));
    EXPECT_EQ(skipped, 3);
  }
}

TEST_F(CudaArguments, AddressesBetweenElements_AreRefused) {
  DeviceLayer owned(make_spec(8, 2, 128, 64, DType::kBF16), {.max_tokens = 64});
  const Tensor hidden = random_tensor(DType::kBF16, 4, 128, 5);
  DeviceForward forward(owned, hidden.view(), DType::kBF16);
  forward.args.hidden.data = static_cast<const std::byte*>(forward.args.hidden.data) + 1;
  EXPECT_EQ(code_of([&] { forward.enqueue(); }), ErrorCode::kMisaligned);
}

// The rows of out may be those of hidden, on every rung.
TEST_F(CudaArguments, InPlace_GivesTheSameBits) {
  for (const testing::NumberForm& form : testing::number_forms()) {
    for (const auto& [top_k, with_shared] :
         {std::pair<int64_t, bool>{2, false}, {2, true}, {1, false}}) {
      MoeSpec spec = testing::with_form(make_spec(8, top_k, 520, 136, form.dtype), form);
      if (with_shared) spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 128};
      DeviceLayer owned(spec, {.max_tokens = 900});
      const DType dtype = testing::row_dtype(form);
      for (const int64_t tokens : {1, 8, 40, 900, 910}) {
        SCOPED_TRACE(::testing::Message() << form.name << " k" << top_k << " T" << tokens);
        const Tensor hidden = random_tensor(dtype, tokens, 520, 5);
        DeviceForward forward(owned, hidden.view(), dtype);
        forward.enqueue();
        const Tensor expected = forward.out();
        forward.args.out = forward.hidden().view();
        forward.enqueue();
        Tensor written(dtype, {tokens, 520});
        owned.queue.download(forward.hidden().const_view(), written.view());
        EXPECT_TRUE(testing::same_bits(written, expected));
      }
    }
  }
}

// No token, one, as many as planned, and one more, which makes two chunks.
TEST_F(CudaArguments, TokensAroundThePlannedNumber_AreTaken) {
  DeviceLayer owned(make_spec(8, 2, 128, 64, DType::kBF16), {.max_tokens = 64});
  for (const int64_t tokens : {0, 1, 63, 64, 65}) {
    const Tensor hidden = random_tensor(DType::kBF16, tokens, 128, 5);
    const testing::GivenRouting routing = testing::random_routing(tokens, 8, 2, 9);
    DeviceForward forward(owned, hidden.view(), DType::kBF16);
    if (tokens > 0) forward.route_by(routing.ids, routing.weights);
    forward.enqueue();
    if (tokens > 0) {
      EXPECT_LE(testing::worst_error(owned, hidden, routing, forward.out()), 6e-3) << tokens;
    }
  }
}

TEST_F(CudaArguments, WorkspaceOfHalfTheBytes_IsRefusedBeforeAnythingIsWritten) {
  DeviceLayer owned(make_spec(8, 2, 128, 64, DType::kBF16), {.max_tokens = 64});
  const Tensor hidden = random_tensor(DType::kBF16, 40, 128, 5);
  DeviceForward forward(owned, hidden.view(), DType::kBF16);
  Workspace small(owned.context, owned.layer.workspace_bytes() / 2);
  forward.args.workspace = &small;
  EXPECT_EQ(code_of([&] { forward.enqueue(); }), ErrorCode::kWorkspaceTooSmall);
  const Tensor out = forward.out();
  const std::vector<std::byte> poison(out.size_bytes(), std::byte{0xFF});
  EXPECT_EQ(std::memcmp(out.as<std::byte>(), poison.data(), poison.size()), 0);
}

TEST_F(CudaArguments, WorkspaceOfOneByteLess_IsRefused) {
  DeviceLayer owned(make_spec(8, 2, 128, 64, DType::kBF16), {.max_tokens = 512});
  const Tensor hidden = random_tensor(DType::kBF16, 300, 128, 5);
  DeviceForward forward(owned, hidden.view(), DType::kBF16);
  Workspace small(owned.context, owned.layer.workspace_bytes(300) - 1);
  forward.args.workspace = &small;
  EXPECT_EQ(code_of([&] { forward.enqueue(); }), ErrorCode::kWorkspaceTooSmall);
}

TEST_F(CudaArguments, PartsThatCudaLacks_AreNamedTogether) {
  const MoeSpec spec = make_spec(1025, 2, 64, 32, DType::kBF16);
  try {
    const DeviceLayer owned(spec, {}, {.ep_size = 5});
    ADD_FAILURE() << "was created";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    const std::string text = error.what();
    EXPECT_NE(text.find("router"), std::string::npos) << text;
    EXPECT_NE(text.find("reduction"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace conclave
