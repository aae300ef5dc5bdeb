// Determinism::kUnordered on a GPU: the down product adds up a token's rows itself, in any order.

#include "cuda/check.h"
#include "cuda/stream.h"
#include "device_layer.h"
#include "support/cuda/guard_pages.h"

#include "conclave/interop/cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::DeviceForward;
using testing::DeviceLayer;
using testing::GivenRouting;
using testing::make_spec;
using testing::NumberForm;
using testing::random_tensor;
using testing::same_bits;

// The form's kernel row that adds; empty if no row takes the form.
std::string adding_row(const NumberForm& form) {
  if (form.dtype != DType::kF8E4M3) return "cuda.tile_sm90";
  return form.quant.activations == ActivationScale::kNone ? "" : "cuda.tile_fp8_sm90";
}

LayerOptions options_of(const NumberForm& form, int64_t max_tokens,
                        Determinism determinism = Determinism::kUnordered) {
  return {.max_tokens = max_tokens, .kernel = adding_row(form), .determinism = determinism};
}

std::vector<NumberForm> adding_forms() {
  std::vector<NumberForm> forms;
  for (const NumberForm& form : testing::number_forms()) {
    if (!adding_row(form).empty()) forms.push_back(form);
  }
  return forms;
}

bool adds(const Plan& plan) {
  return std::any_of(plan.rows.begin(), plan.rows.end(), [](const PlanRow& row) {
    return row.table == "sum" && row.name == "cuda.any_order" && row.chosen;
  });
}

// Runs on a workspace of NaN, which reveals sums that were not cleared.
Tensor run(DeviceLayer& owned, const Tensor& hidden, const GivenRouting& routing, DType dtype) {
  TensorView rest{.data = owned.workspace.memory().data() + 256,
                  .dtype = DType::kU8,
                  .shape = {static_cast<int64_t>(owned.workspace.memory().size()) - 256}};
  owned.queue.fill(rest, 0xFF);
  DeviceForward forward(owned, hidden.view(), dtype);
  forward.route_by(routing.ids, routing.weights);
  forward.enqueue();
  return forward.out();
}

class CudaUnordered : public testing::CudaLayerTest {};

TEST_F(CudaUnordered, EachFormAndSize_IsWithinTheBar) {
  struct Size {
    int64_t experts, top_k, hidden, inner;
  };
  for (const NumberForm& form : adding_forms()) {
    for (const Size& size : {Size{6, 3, 264, 136}, Size{10, 5, 130, 100}, Size{60, 8, 1032, 40},
                             Size{5, 5, 576, 192}}) {
      MoeSpec spec = testing::with_form(
          make_spec(size.experts, size.top_k, size.hidden, size.inner, form.dtype), form);
      spec.has_bias = size.experts == 6;
      DeviceLayer owned(spec, options_of(form, 300));
      ASSERT_TRUE(adds(owned.layer.plan()));
      EXPECT_EQ(owned.layer.plan().determinism, "none");
      for (const int64_t tokens : {1, 129, 300}) {
        for (const DType dtype : {testing::row_dtype(form), DType::kF32}) {
          SCOPED_TRACE(::testing::Message()
                       << form.name << " H" << size.hidden << " k" << size.top_k << " T" << tokens);
          const Tensor hidden = random_tensor(testing::row_dtype(form), tokens, size.hidden, 5);
          const auto routing = testing::random_routing(tokens, size.experts, size.top_k, 9);
          const Tensor out = run(owned, hidden, routing, dtype);
          EXPECT_LE(testing::worst_error(owned, hidden, routing, out), 6e-3);
        }
      }
    }
  }
}

// Runs every tile of the rows that add; a table chooses it, as bf16 layers for many tokens have
// several.
TEST_F(CudaUnordered, EachTile_IsWithinTheBar) {
  int tiles = 0;
  for (const NumberForm& form : adding_forms()) {
    const MoeSpec spec = testing::with_form(make_spec(10, 3, 320, 136, form.dtype), form);
    const Context context({.device = "cuda:0", .num_threads = 1});
    const Tensor hidden = random_tensor(testing::row_dtype(form), 290, 320, 5);
    const auto routing = testing::random_routing(290, 10, 3, 9);
    for (const TuningEntry& entry :
         tuning_candidates(context, spec, {.max_tokens = 290}, {}, 290)) {
      if (entry.kernel != adding_row(form)) continue;
      SCOPED_TRACE(form.name + " " + entry.tile);
      auto table = std::make_shared<TuningTable>();
      table->set(entry);
      LayerOptions options = options_of(form, 290);
      options.tuning = table;
      DeviceLayer owned(spec, options);
      ASSERT_EQ(owned.layer.plan().ladder.back().tile, entry.tile);
      const Tensor out = run(owned, hidden, routing, testing::row_dtype(form));
      EXPECT_LE(testing::worst_error(owned, hidden, routing, out), 6e-3);
      ++tiles;
    }
  }
  EXPECT_GE(tiles, 10);
}

// A sum of two rows is the same in either order, so any other difference between the two ways
// shows.
TEST_F(CudaUnordered, TwoExpertsAToken_HaveTheBitsOfTheOrderedSum) {
  for (const NumberForm& form : adding_forms()) {
    MoeSpec spec = testing::with_form(make_spec(12, 2, 328, 136, form.dtype), form);
    spec.output_scale = 1.75;
    DeviceLayer ordered(spec, options_of(form, 300, Determinism::kRepeatable));
    DeviceLayer unordered(spec, options_of(form, 300));
    ASSERT_FALSE(adds(ordered.layer.plan()));
    ASSERT_TRUE(adds(unordered.layer.plan()));
    for (const int64_t tokens : {1, 33, 300, 700}) {
      SCOPED_TRACE(::testing::Message() << form.name << " T" << tokens);
      const Tensor hidden = random_tensor(testing::row_dtype(form), tokens, 328, 5);
      GivenRouting routing = testing::random_routing(tokens, 12, 2, 9);
      for (int64_t slot = 0; slot < tokens * 2; ++slot) {
        routing.weights.as<float>()[slot] = 0.1F + static_cast<float>(slot % 7) * 0.13F;
        if (slot % 5 == 0) routing.ids.as<int32_t>()[slot] = -1;
      }
      for (const DType dtype : {testing::row_dtype(form), DType::kF32}) {
        EXPECT_TRUE(same_bits(run(ordered, hidden, routing, dtype),
                              run(unordered, hidden, routing, dtype)));
      }
    }
  }
}

// Covers all other terms that join the sum before it is rounded.
TEST_F(CudaUnordered, OtherTerms_HaveTheBitsOfTheOrderedSum) {
  const MoeSpec plain = make_spec(8, 2, 256, 128, DType::kBF16);
  std::vector<MoeSpec> specs(6, plain);
  specs[0].shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 192};
  specs[1].num_zero_experts = 2;
  specs[1].has_output_bias = true;
  specs[2].residual.intermediate_size = 96;
  specs[3].latent.size = 128;
  specs[4].shared = {.mode = SharedMode::kSoftmaxMix, .intermediate_size = 192};
  specs[5].shared = {.mode = SharedMode::kAverage, .intermediate_size = 192};
  for (size_t i = 0; i < specs.size(); ++i) {
    SCOPED_TRACE(::testing::Message() << "spec " << i);
    LayerOptions options{.max_tokens = 200, .kernel = "cuda.tile_sm90"};
    DeviceLayer ordered(specs[i], options);
    options.determinism = Determinism::kUnordered;
    DeviceLayer unordered(specs[i], options);
    ASSERT_TRUE(adds(unordered.layer.plan()));
    for (const int64_t tokens : {40, 200}) {
      const Tensor hidden = random_tensor(DType::kBF16, tokens, 256, 5);
      Tensor mask(DType::kBool, {tokens});
      for (int64_t t = 0; t < tokens; ++t) mask.as<bool>()[t] = t % 9 != 4;
      const auto out_of = [&](DeviceLayer& owned) {
        DeviceForward forward(owned, hidden.view(), DType::kBF16);
        const DeviceTensor uploaded = owned.queue.upload(mask.view());
        forward.args.padding_mask = uploaded.const_view();
        forward.enqueue();
        return forward.out();
      };
      EXPECT_TRUE(same_bits(out_of(ordered), out_of(unordered)));
    }
  }
}

TEST_F(CudaUnordered, SharedSlotsAndOneExpertAToken_FallBackAndSayWhy) {
  MoeSpec shared = make_spec(8, 2, 256, 128, DType::kBF16);
  shared.shared = {.mode = SharedMode::kAdd, .intermediate_size = 128};
  const MoeSpec one = make_spec(8, 1, 256, 128, DType::kBF16);
  for (const MoeSpec& spec : {shared, one}) {
    LayerOptions options{.max_tokens = 200, .kernel = "cuda.tile_sm90"};
    DeviceLayer ordered(spec, options);
    options.determinism = Determinism::kUnordered;
    DeviceLayer owned(spec, options);
    EXPECT_FALSE(adds(owned.layer.plan()));
    EXPECT_EQ(owned.layer.plan().determinism, "D1");
    EXPECT_NE(explain(owned.layer.plan()).find("cuda.any_order"), std::string::npos);
    EXPECT_EQ(owned.layer.workspace_bytes(), ordered.layer.workspace_bytes());
    const Tensor hidden = random_tensor(DType::kBF16, 200, 256, 5);
    EXPECT_TRUE(same_bits(testing::run_device_layer(ordered, hidden.view(), DType::kBF16).out,
                          testing::run_device_layer(owned, hidden.view(), DType::kBF16).out));
  }
}

TEST_F(CudaUnordered, WhatIsNotFinite_StaysInItsToken) {
  for (const NumberForm& form : adding_forms()) {
    const MoeSpec spec = testing::with_form(make_spec(6, 2, 264, 136, form.dtype), form);
    DeviceLayer owned(spec, options_of(form, 300));
    for (const int64_t tokens : {40, 300}) {
      SCOPED_TRACE(::testing::Message() << form.name << " T" << tokens);
      Tensor hidden = random_tensor(testing::row_dtype(form), tokens, 264, 5);
      GivenRouting routing = testing::random_routing(tokens, 6, 2, 9);
      const Tensor clean = run(owned, hidden, routing, DType::kF32);
      hidden.as<uint16_t>()[(tokens - 2) * 264 + 263] = form.dtype == DType::kF16 ? 0x7E00 : 0x7FC0;
      routing.weights.as<float>()[1 * 2 + 1] = std::numeric_limits<float>::infinity();
      const Tensor out = run(owned, hidden, routing, DType::kF32);
      for (int64_t token = 0; token < tokens; ++token) {
        bool finite = true;
        for (int64_t c = 0; c < 264; ++c) finite &= std::isfinite(out.as<float>()[token * 264 + c]);
        const bool hit = token == 1 || token == tokens - 2;
        ASSERT_EQ(finite, !hit) << token;
        if (hit) continue;
        ASSERT_TRUE(testing::row_bytes(out, token) == testing::row_bytes(clean, token)) << token;
      }
    }
  }
}

// A graph is captured once: every replay starts its sums anew, and rows beyond the live ones stay.
TEST_F(CudaUnordered, ReplaysOnOtherRowsAndTokens_HaveTheBitsOfTheOrderedSum) {
  for (const NumberForm& form : adding_forms()) {
    const MoeSpec spec = testing::with_form(make_spec(10, 2, 264, 136, form.dtype), form);
    DeviceLayer ordered(spec, options_of(form, 300, Determinism::kRepeatable));
    DeviceLayer owned(spec, options_of(form, 300));
    const DType dtype = testing::row_dtype(form);
    const GivenRouting routing = testing::random_routing(300, 10, 2, 9);
    const auto prepare = [&](DeviceLayer& layer, DeviceTensor& live) {
      auto forward =
          std::make_unique<DeviceForward>(layer, random_tensor(dtype, 300, 264, 1).view(), dtype);
      forward->route_by(routing.ids, routing.weights);
      forward->args.num_tokens = static_cast<const int64_t*>(live.const_view().data);
      return forward;
    };
    DeviceTensor live = owned.queue.upload(Tensor(DType::kI64, {1}).view());
    const auto captured = prepare(owned, live);
    const auto plain = prepare(ordered, live);
    cudaStream_t const stream = to_cuda(owned.queue.stream());
    const cuda::OwnedGraph graph = cuda::capture(stream, [&] { captured->enqueue(); });
    uint64_t seed = 3;
    for (const int64_t count : {300, 1, 140, 0, 299, -4}) {
      SCOPED_TRACE(::testing::Message() << form.name << ", " << count << " live");
      Tensor counts(DType::kI64, {1});
      counts.as<int64_t>()[0] = count;
      owned.queue.upload(counts.const_view(), live.view());
      const Tensor hidden = random_tensor(dtype, 300, 264, ++seed);
      owned.queue.upload(hidden.const_view(), captured->hidden().view());
      owned.queue.fill(captured->args.out, 0xFF);
      cuda::check(cudaGraphLaunch(graph.get(), stream), "cudaGraphLaunch");
      const Tensor out = captured->out();
      ordered.queue.upload(hidden.const_view(), plain->hidden().view());
      ordered.queue.fill(plain->args.out, 0xFF);
      plain->enqueue();
      EXPECT_TRUE(same_bits(out, plain->out()));
    }
  }
}

TEST_F(CudaUnordered, WorkspaceAgainstAHole_NothingFaults) {
  for (const testing::GuardSide side : {testing::GuardSide::kEnd, testing::GuardSide::kBegin}) {
    testing::GuardPageAllocator allocator(side);
    for (const NumberForm& form : adding_forms()) {
      const MoeSpec spec = testing::with_form(make_spec(6, 3, 130, 68, form.dtype), form);
      DeviceLayer plain(spec, options_of(form, 150));
      const Context context({.device = "cuda:0", .num_threads = 1, .device_allocator = &allocator});
      const MoeLayer layer = MoeLayer::create(context, spec, *plain.source, options_of(form, 150));
      Workspace workspace(context, layer.workspace_bytes());
      for (const int64_t tokens : {1, 60, 150, 200}) {
        SCOPED_TRACE(::testing::Message() << form.name << " T" << tokens);
        const Tensor hidden = random_tensor(testing::row_dtype(form), tokens, 130, 5);
        const auto routing = testing::random_routing(tokens, 6, 3, 9);
        DeviceForward forward(plain, hidden.view(), testing::row_dtype(form));
        forward.route_by(routing.ids, routing.weights);
        forward.args.workspace = &workspace;
        layer.forward(forward.args);
        EXPECT_LE(testing::worst_error(plain, hidden, routing, forward.out()), 6e-3);
      }
    }
  }
}

// Bytes of the workspace that a call writes: those that keep neither of two fillings.
TEST_F(CudaUnordered, Workspace_IsAtMostAQuarterMoreThanWhatIsWritten) {
  for (const NumberForm& form : adding_forms()) {
    const MoeSpec spec = testing::with_form(make_spec(32, 8, 512, 128, form.dtype), form);
    DeviceLayer ordered(spec, options_of(form, 600, Determinism::kRepeatable));
    DeviceLayer owned(spec, options_of(form, 600));
    const Tensor hidden = random_tensor(DType::kF32, 600, 512, 5);
    DeviceForward forward(owned, hidden.view(), DType::kF32);
    const std::span<std::byte> memory = owned.workspace.memory();
    const auto bytes = static_cast<int64_t>(memory.size());
    const TensorView all{.data = memory.data(), .dtype = DType::kU8, .shape = {bytes}};
    const TensorView rest{.data = memory.data() + 256, .dtype = DType::kU8, .shape = {bytes - 256}};
    std::vector<uint8_t> touched(memory.size(), 0);
    Tensor copy(DType::kU8, {bytes});
    for (const uint8_t filling : {uint8_t{0xFF}, uint8_t{0x5A}}) {
      owned.queue.fill(rest, filling);
      forward.enqueue();
      owned.queue.download(all, copy.view());
      for (int64_t i = 256; i < bytes; ++i) {
        if (copy.as<uint8_t>()[i] != filling) touched[static_cast<size_t>(i)] = 1;
      }
    }
    const auto written = std::count(touched.begin(), touched.end(), uint8_t{1});
    EXPECT_LE(static_cast<double>(bytes), 1.25 * static_cast<double>(written)) << form.name;
    EXPECT_EQ(owned.layer.workspace_bytes(), owned.layer.plan().workspace_bytes);
    EXPECT_LT(owned.layer.workspace_bytes(), ordered.layer.workspace_bytes()) << form.name;
  }
}

}  // namespace
}  // namespace conclave
