// Compares layers on a GPU, whose columns have an order or factors, with float64.

#include "device_layer.h"
#include "layer/cuda/ordered_source.h"
#include "layer/known_scales.h"

#include "conclave/checkpoint.h"
#include "conclave/tuning.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::DeviceLayer;
using testing::make_spec;
using testing::Orders;
using testing::random_tensor;
using testing::source_for;

constexpr double kBar = 6e-3;

struct Form {
  const char* name;
  DType dtype;
  QuantSpec quant;
};

QuantSpec groups(int64_t columns, WeightZero zeros = WeightZero::kNone) {
  return {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns, .zeros = zeros};
}
Form ordered(const char* name, DType dtype, QuantSpec quant) {
  quant.has_column_order = true;
  return {name, dtype, quant};
}
Form scaled(const char* name, DType dtype, QuantSpec quant) {
  quant.has_column_factors = true;
  return {name, dtype, quant};
}

std::vector<Form> ordered_forms() {
  return {ordered("int4, 32 columns", DType::kI4, groups(32)),
          ordered("int4, 32 columns, zero points", DType::kI4, groups(32, WeightZero::kPoint)),
          ordered("int4, 128 columns", DType::kI4, groups(128)),
          ordered("int4, 16 columns, zero points", DType::kI4, groups(16, WeightZero::kPoint)),
          ordered("int4, 48 columns, offsets", DType::kI4, groups(48, WeightZero::kOffset)),
          ordered("e2m1, 32 columns", DType::kF4, groups(32)),
          ordered("nf4, 64 columns", DType::kNF4, groups(64)),
          ordered("int8, 32 columns, zero points", DType::kI8, groups(32, WeightZero::kPoint)),
          ordered("int8, 64 columns, offsets", DType::kI8, groups(64, WeightZero::kOffset)),
          ordered("e4m3, 32 columns", DType::kF8E4M3, groups(32))};
}

std::vector<Form> scaled_forms() {
  QuantSpec one_step = groups(64);
  one_step.activations = ActivationScale::kTensorStatic;
  QuantSpec by_token = groups(32);
  by_token.activations = ActivationScale::kToken;
  QuantSpec nvfp4 = groups(16);
  nvfp4.activations = ActivationScale::kGroup;
  nvfp4.activation_group = 16;
  nvfp4.activation_dtype = DType::kF4;
  nvfp4.activation_scale_rule = RowScaleRule::kTwoLevel;
  nvfp4.has_global_scale = true;
  QuantSpec both = groups(32);
  both.has_column_order = true;
  return {scaled("int4, 128 columns", DType::kI4, groups(128)),
          scaled("int4, 32 columns, zero points", DType::kI4, groups(32, WeightZero::kPoint)),
          scaled("int4, 32 columns, offsets", DType::kI4, groups(32, WeightZero::kOffset)),
          scaled("int4, in order", DType::kI4, both),
          scaled("nf4, 64 columns", DType::kNF4, groups(64)),
          scaled("int8, rows", DType::kI8, {.weights = WeightScale::kChannel}),
          scaled("e4m3, rows of one step", DType::kF8E4M3, one_step),
          scaled("int4, int8 rows", DType::kI4, by_token),
          scaled("nvfp4, nvfp4 rows", DType::kF4, nvfp4)};
}

std::vector<Form> all_forms() {
  std::vector<Form> forms = ordered_forms();
  for (Form& form : scaled_forms()) forms.push_back(form);
  return forms;
}

void expect_accurate(DeviceLayer& owned, int64_t tokens) {
  testing::expect_accurate(owned, tokens, kBar);
}

// Shapes that no block divides, and every part that reads rows or makes them.
std::vector<MoeSpec> specs_of(DType dtype) {
  MoeSpec odd = make_spec(5, 2, 127, 65, dtype);
  MoeSpec one = make_spec(3, 1, 264, 136, dtype);
  MoeSpec shared = make_spec(6, 2, 264, 136, dtype);
  shared.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 272};
  MoeSpec two_shared = make_spec(6, 2, 136, 72, dtype);
  two_shared.shared = {.mode = SharedMode::kFusedSlots, .intermediate_size = 72, .count = 2};
  MoeSpec on_input = make_spec(6, 3, 136, 72, dtype);
  on_input.weight_on = WeightOn::kInput;
  MoeSpec biased = make_spec(5, 2, 712, 328, dtype);
  biased.has_bias = true;
  MoeSpec plain = make_spec(5, 2, 127, 65, dtype);
  plain.activation = {.name = "relu2_no_mul"};
  MoeSpec latent = make_spec(5, 2, 264, 72, dtype);
  latent.latent = {.size = 128, .has_norm = true};
  return {odd, one, shared, two_shared, on_input, biased, plain, latent};
}

class CudaOwnColumns : public testing::CudaLayerTest {
 protected:
  static void expect_form_accurate(const Form& form, Orders orders, const std::string& kernel) {
    for (MoeSpec spec : specs_of(form.dtype)) {
      spec.quant = form.quant;
      // Float32 sums of a projection may be rounded to other codes than the oracle's.
      if (spec.latent.size != 0 && form.quant.activations != ActivationScale::kNone) continue;
      SCOPED_TRACE(std::string(form.name) + ", H" + std::to_string(spec.hidden_size) + ", " +
                   kernel);
      DeviceLayer owned(spec, source_for(spec, orders), {.max_tokens = 64, .kernel = kernel});
      for (const int64_t tokens : {1, 8, 40}) expect_accurate(owned, tokens);
    }
  }
};

TEST_F(CudaOwnColumns, OneOrderOfGateAndUp_IsWithinTheBar) {
  for (const Form& form : ordered_forms()) {
    expect_form_accurate(form, Orders::kAlike, "cuda.stream_codes_sm90");
  }
}

TEST_F(CudaOwnColumns, OrdersOfTheirOwn_AreWithinTheBar) {
  for (const Form& form : ordered_forms()) {
    expect_form_accurate(form, Orders::kApart, "cuda.stream_codes_sm90");
  }
}

TEST_F(CudaOwnColumns, UnevenGroups_AreWithinTheBar) {
  for (const Form& form : ordered_forms()) {
    for (MoeSpec spec : {make_spec(5, 2, 264, 136, form.dtype)}) {
      if (form.quant.block_cols >= 128) continue;
      spec.quant = form.quant;
      spec.has_bias = true;
      const ActivationSpec clamped{.name = "swiglu_oai", .limit = 7, .alpha = 1.702, .beta = 1};
      for (const ActivationSpec& activation : {ActivationSpec(), clamped}) {
        spec.activation = activation;
        SCOPED_TRACE(std::string(form.name) + ", " + activation.name);
        DeviceLayer owned(spec, source_for(spec, Orders::kUneven), {.max_tokens = 64});
        for (const int64_t tokens : {1, 8, 40}) expect_accurate(owned, tokens);
      }
    }
  }
}

TEST_F(CudaOwnColumns, FactorsOfColumns_AreWithinTheBar) {
  for (const Form& form : scaled_forms()) {
    expect_form_accurate(form, Orders::kApart, "cuda.stream_codes_sm90");
  }
}

TEST_F(CudaOwnColumns, ThePlainKernel_IsWithinTheBar) {
  for (const Form& form : all_forms()) {
    expect_form_accurate(form, Orders::kApart, "cuda.reference");
  }
  const Form narrow = ordered("int4, 8 columns", DType::kI4, groups(8, WeightZero::kPoint));
  expect_form_accurate(narrow, Orders::kApart, "");
}

// A result does not depend on the tile, and so not on the batch that chooses it.
TEST_F(CudaOwnColumns, EveryTile_GivesTheSameBits) {
  const Context context({.device = "cuda:0", .num_threads = 1});
  for (const Form& form : all_forms()) {
    MoeSpec spec = make_spec(5, 2, 712, 328, form.dtype);
    spec.quant = form.quant;
    spec = with_known_scales(spec, *make_synthetic_source(spec, 11));
    for (const int64_t tokens : {1, 37, 290}) {
      const Tensor hidden = random_tensor(DType::kBF16, tokens, spec.hidden_size, 5);
      std::vector<std::byte> first;
      int tiles = 0;
      for (const TuningEntry& entry :
           tuning_candidates(context, spec, {.max_tokens = tokens}, {}, tokens)) {
        if (entry.kernel != "cuda.stream_codes_sm90") continue;
        SCOPED_TRACE(std::string(form.name) + ", " + entry.tile + ", T" + std::to_string(tokens));
        auto table = std::make_shared<TuningTable>();
        table->set(entry);
        DeviceLayer owned(spec, source_for(spec, Orders::kAlike),
                          {.max_tokens = tokens, .tuning = table});
        const Tensor out = testing::run_device_layer(owned, hidden.view(), DType::kBF16).out;
        const std::vector<std::byte> bytes(out.as<std::byte>(),
                                           out.as<std::byte>() + out.size_bytes());
        if (tiles++ == 0) {
          expect_accurate(owned, tokens);
          first = bytes;
        }
        EXPECT_EQ(bytes, first);
      }
      EXPECT_GE(tiles, 2) << form.name;
    }
  }
}

Tensor run_routed(DeviceLayer& owned, const Tensor& hidden, const testing::GivenRouting& routing) {
  testing::DeviceForward forward(owned, hidden.view(), DType::kF32);
  forward.route_by(routing.ids, routing.weights);
  forward.enqueue();
  return forward.out();
}

// All on one expert, and experts without rows, in memory that holds NaN.
TEST_F(CudaOwnColumns, OneHotExpertInPoisonedMemory_IsWithinTheBar) {
  constexpr int64_t kTokens = 70;
  for (const Form& form : all_forms()) {
    SCOPED_TRACE(form.name);
    MoeSpec spec = make_spec(6, 2, 264, 136, form.dtype);
    spec.quant = form.quant;
    DeviceLayer owned(spec, source_for(spec, Orders::kApart), {.max_tokens = kTokens});
    const Tensor hidden = random_tensor(DType::kBF16, kTokens, spec.hidden_size, 5);
    testing::GivenRouting routing = testing::random_routing(kTokens, 6, 2, 3);
    for (int64_t token = 0; token < kTokens; ++token) {
      routing.ids.as<int32_t>()[2 * token] = 3;
      routing.ids.as<int32_t>()[2 * token + 1] = token % 7 == 0 ? 5 : -1;
    }
    const std::span<std::byte> memory = owned.workspace.memory().subspan(256);
    owned.queue.fill({.data = memory.data(),
                      .dtype = DType::kU8,
                      .shape = {static_cast<int64_t>(memory.size())}},
                     0xFF);
    const Tensor out = run_routed(owned, hidden, routing);
    EXPECT_LE(testing::worst_error(owned, hidden, routing, out), kBar);
  }
}

// The rows of the routed experts of two ranks add up, and so do those of slices.
TEST_F(CudaOwnColumns, RanksAndSlices_AddUpToTheWhole) {
  constexpr int64_t kTokens = 20;
  for (const Form& form : all_forms()) {
    for (const bool sliced : {false, true}) {
      if (sliced && form.quant.activations != ActivationScale::kNone) continue;
      for (const int32_t ranks : {2, 3}) {
        SCOPED_TRACE(std::string(form.name) + (sliced ? ", slices of " : ", ") +
                     std::to_string(ranks));
        MoeSpec spec = make_spec(6, 2, 136, 96 * ranks, form.dtype);
        spec.quant = form.quant;
        spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 48 * ranks};
        const Tensor hidden = random_tensor(DType::kBF16, kTokens, spec.hidden_size, 5);
        const testing::GivenRouting routing = testing::random_routing(kTokens, 6, 2, 9);
        Tensor total(DType::kF32, {kTokens, spec.hidden_size});
        std::fill_n(total.as<float>(), kTokens * spec.hidden_size, 0.0F);
        std::unique_ptr<DeviceLayer> last;
        for (int32_t rank = 0; rank < ranks; ++rank) {
          ParallelSpec parallel{.reduce = Reduce::kPartial};
          (sliced ? parallel.tp_size : parallel.ep_size) = ranks;
          (sliced ? parallel.tp_rank : parallel.ep_rank) = rank;
          last = std::make_unique<DeviceLayer>(spec, source_for(spec, Orders::kApart),
                                               LayerOptions{.max_tokens = 32}, parallel);
          const Tensor part = run_routed(*last, hidden, routing);
          for (int64_t i = 0; i < kTokens * spec.hidden_size; ++i) {
            total.as<float>()[i] += part.as<float>()[i];
          }
        }
        EXPECT_LE(testing::worst_error(*last, hidden, routing, total), kBar);
      }
    }
  }
}

// A row with a value that is not finite is NaN, and the others are as without it.
TEST_F(CudaOwnColumns, ValuesThatAreNotFinite_StayInTheirRow) {
  for (const Form& form : all_forms()) {
    SCOPED_TRACE(form.name);
    MoeSpec spec = make_spec(5, 2, 264, 136, form.dtype);
    spec.quant = form.quant;
    DeviceLayer owned(spec, source_for(spec, Orders::kApart), {.max_tokens = 16});
    Tensor hidden = random_tensor(DType::kBF16, 9, spec.hidden_size, 5);
    const testing::GivenRouting routing = testing::random_routing(9, 5, 2, 3);
    const Tensor before = run_routed(owned, hidden, routing);
    hidden.as<uint16_t>()[2 * spec.hidden_size + 7] = 0x7f80;
    hidden.as<uint16_t>()[6 * spec.hidden_size + 200] = 0x7fc0;
    const Tensor after = run_routed(owned, hidden, routing);
    for (int64_t token = 0; token < 9; ++token) {
      for (int64_t i = 0; i < spec.hidden_size; ++i) {
        const int64_t at = token * spec.hidden_size + i;
        if (token == 2 || token == 6) {
          ASSERT_FALSE(std::isfinite(after.as<float>()[at])) << token << " " << i;
        } else {
          ASSERT_EQ(after.as<float>()[at], before.as<float>()[at]) << token << " " << i;
        }
      }
    }
  }
}

TEST_F(CudaOwnColumns, AReload_BringsItsOwnOrdersAndFactors) {
  for (const Form& form : {ordered_forms().front(), scaled_forms().front()}) {
    SCOPED_TRACE(form.name);
    MoeSpec spec = make_spec(5, 2, 264, 136, form.dtype);
    spec.quant = form.quant;
    DeviceLayer owned(spec, source_for(spec, Orders::kApart), {.max_tokens = 16});
    expect_accurate(owned, 9);
    uint64_t seed = 77;
    for (const ReloadMode mode : {ReloadMode::kStaged, ReloadMode::kInPlace}) {
      owned.source = make_synthetic_source(spec, seed++);
      owned.layer.reload(*owned.source, mode);
      expect_accurate(owned, 9);
    }
  }
}

// Files as the packages wrote them.
TEST_F(CudaOwnColumns, GoldenCheckpoints_AreWithinTheBar) {
  const std::filesystem::path root = "testdata/quantised";
  if (!std::filesystem::is_directory(root)) GTEST_SKIP() << root << " is not here";
  int count = 0;
  for (const auto& folder : std::filesystem::directory_iterator(root)) {
    if (!folder.is_directory()) continue;
    const Checkpoint checkpoint = Checkpoint::open(folder.path());
    const CheckpointLayer& layer = checkpoint.layers().front();
    const QuantSpec& quant = layer.spec.quant;
    if (!quant.has_column_order && !quant.has_column_factors) continue;
    SCOPED_TRACE(folder.path().string());
    ++count;
    const MoeSpec& spec = layer.spec;
    DeviceLayer owned(spec, checkpoint.layer_source(layer.index), {.max_tokens = 64});
    EXPECT_EQ(owned.layer.plan().ladder.front().kernel, "cuda.stream_codes_sm90");
    for (const int64_t tokens : {1, 33}) {
      const Tensor hidden = random_tensor(DType::kBF16, tokens, spec.hidden_size, 5);
      const testing::GivenRouting routing =
          testing::random_routing(tokens, spec.num_experts, spec.top_k, 3);
      const Tensor out = run_routed(owned, hidden, routing);
      EXPECT_LE(testing::worst_error(owned, hidden, routing, out), kBar);
    }
  }
  EXPECT_EQ(count, 13);
}

}  // namespace
}  // namespace conclave
