// Codes of 4 bits whose scales, and offsets, are steps of 16 columns, as GGUF's Q3_K and Q2_K have
// them, and those of 2 bits: kernels for tensor cores multiply codes by steps.
#include "device_layer.h"
#include "layer/cuda/few_tokens.h"

#include "conclave/placement.h"
#include "conclave/tuning.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::CudaLayerTest;
using testing::DeviceLayer;
using testing::make_spec;
using testing::one_launch_table;
using testing::random_tensor;

struct Form {
  const char* name;
  DType dtype;
  WeightZero zeros;
  bool is_small = false;  // codes are 0 to 3
};
constexpr Form kForms[] = {{"Q3_K", DType::kI4, WeightZero::kNone},
                           {"Q2_K", DType::kI4, WeightZero::kOffset},
                           {"Q2_K beside Q4_K", DType::kU4, WeightZero::kOffset},
                           {"small Q2_K", DType::kI4, WeightZero::kOffset, true},
                           {"small codes without a sign", DType::kU4, WeightZero::kOffset, true}};

MoeSpec in_form(MoeSpec spec, const Form& form) {
  spec.quant = {
      .weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 16, .zeros = form.zeros};
  spec.quant.scale_values = ScaleValues::kSteps;
  if (form.zeros == WeightZero::kOffset) spec.quant.zero_values = ScaleValues::kSteps;
  if (form.is_small) {
    spec.quant.gate_up_codes.dtype = spec.quant.down_codes.dtype = DType::kU2;
  }
  return spec;
}

// Some scales are four times as much, so that bf16 does not hold their steps' products with codes.
// So are their offsets: weights of one sign would add up what rows lose by being rounded.
class WideSteps final : public WeightSource {
 public:
  explicit WideSteps(std::unique_ptr<WeightSource> inner) : inner_(std::move(inner)) {}

  WeightInfo describe(WeightId id) const override { return inner_->describe(id); }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    inner_->read(id, expert, block, destination);
    const bool is_number = id.plane() == WeightPlane::kScale || id.plane() == WeightPlane::kZero;
    if (!is_number || !id.matrix()) return;
    std::byte* at = destination.data();
    for (int64_t row = block.row_begin; row < block.row_end; ++row) {
      for (int64_t col = block.col_begin; col < block.col_end; ++col, at += sizeof(float)) {
        if ((row + 3 * col) % 7 != 0) continue;
        float number = 0;
        std::memcpy(&number, at, sizeof(number));
        number *= 4;
        std::memcpy(at, &number, sizeof(number));
      }
    }
  }

 private:
  std::unique_ptr<WeightSource> inner_;
};

enum class Steps : uint8_t { kNarrow, kWide };
constexpr Steps kBoth[] = {Steps::kNarrow, Steps::kWide};
// Those of small codes are no wider than half a byte.
std::span<const Steps> steps_of(const Form& form) {
  return std::span(kBoth).first(form.is_small ? 1 : 2);
}

std::unique_ptr<WeightSource> source_of(const MoeSpec& spec, Steps steps, uint64_t seed = 7) {
  auto source = make_synthetic_source(spec, seed);
  if (steps == Steps::kNarrow) return source;
  return std::make_unique<WideSteps>(std::move(source));
}

class CudaTimesSteps : public CudaLayerTest {
 protected:
  static void expect_accurate(DeviceLayer& owned, int64_t tokens) {
    testing::expect_accurate(owned, tokens,
                             accuracy_bar(owned.layer.spec().weight_dtype, DType::kBF16));
  }
  static Tensor run(DeviceLayer& owned, const Tensor& hidden) {
    return testing::run_device_layer(owned, hidden.view(), DType::kBF16).out;
  }
  // Every tile of a kernel gives the bits of its first, which is within the bar.
  static void expect_same_bits_of_tiles(const std::string& kernel, const MoeSpec& spec, Steps steps,
                                        int64_t tokens, int least_tiles) {
    const Context context({.device = "cuda:0", .num_threads = 1});
    const LayerOptions options{.max_tokens = tokens};
    const Tensor hidden = random_tensor(DType::kBF16, tokens, spec.hidden_size, 5);
    Tensor first;
    int tiles = 0;
    for (const TuningEntry& entry : tuning_candidates(context, spec, options, {}, tokens)) {
      if (entry.kernel != kernel) continue;
      SCOPED_TRACE(entry.kernel + ", " + entry.tile + ", T" + std::to_string(tokens));
      auto table = std::make_shared<TuningTable>();
      table->set(entry);
      DeviceLayer owned(spec, source_of(spec, steps), {.max_tokens = tokens, .tuning = table});
      ASSERT_EQ(owned.layer.plan().ladder.back().tile, entry.tile);
      Tensor out = run(owned, hidden);
      if (tiles++ == 0) {
        expect_accurate(owned, tokens);
        first = std::move(out);
      } else {
        EXPECT_TRUE(testing::same_bits(out, first));
      }
    }
    EXPECT_GE(tiles, least_tiles) << kernel;
  }
};

// In shapes that no tile, stage or group divides.
TEST_F(CudaTimesSteps, EveryTile_GivesTheSameBits) {
  for (const Form& form : kForms) {
    for (const Steps steps : steps_of(form)) {
      SCOPED_TRACE(std::string(form.name) + (steps == Steps::kWide ? ", wide" : ""));
      MoeSpec biased = in_form(make_spec(5, 2, 712, 328, form.dtype), form);
      biased.has_bias = true;
      MoeSpec plain = in_form(make_spec(4, 2, 1160, 72, form.dtype), form);
      plain.activation = {.name = "relu2_no_mul"};
      for (const MoeSpec& spec : {biased, plain}) {
        for (const int64_t tokens : {1, 37, 290}) {
          expect_same_bits_of_tiles("cuda.stream_codes_sm90", spec, steps, tokens,
                                    form.is_small ? 3 : 4);
        }
      }
    }
  }
}

TEST_F(CudaTimesSteps, EveryTileOfManyRows_GivesTheSameBits) {
  for (const Form& form : kForms) {
    for (const Steps steps : steps_of(form)) {
      SCOPED_TRACE(std::string(form.name) + (steps == Steps::kWide ? ", wide" : ""));
      const MoeSpec spec = in_form(make_spec(4, 2, 1032, 776, form.dtype), form);
      for (const int64_t tokens : {1, 200, 490}) {
        expect_same_bits_of_tiles("cuda.tile_codes_sm90", spec, steps, tokens, 2);
      }
    }
  }
}

TEST_F(CudaTimesSteps, OneLaunch_IsWithinTheBarAndRepeatsItsBits) {
  for (const Form& form : kForms) {
    for (const Steps steps : steps_of(form)) {
      SCOPED_TRACE(std::string(form.name) + (steps == Steps::kWide ? ", wide" : ""));
      MoeSpec biased = in_form(make_spec(5, 2, 712, 328, form.dtype), form);
      biased.has_bias = true;
      MoeSpec plain = in_form(make_spec(4, 1, 264, 520, form.dtype), form);
      plain.activation = {.name = "relu2_no_mul"};
      const MoeSpec deep = in_form(make_spec(9, 8, 1160, 1544, form.dtype), form);
      for (const MoeSpec& spec : {biased, plain, deep}) {
        DeviceLayer owned(spec, source_of(spec, steps),
                          {.max_tokens = 8, .tuning = one_launch_table(spec)});
        for (const int64_t tokens : {1, 2, 5, 8}) expect_accurate(owned, tokens);
        const Tensor hidden = random_tensor(DType::kBF16, 4, spec.hidden_size, 5);
        const Tensor first = run(owned, hidden);
        for (int again = 0; again < 10; ++again) {
          EXPECT_TRUE(testing::same_bits(run(owned, hidden), first));
        }
      }
    }
  }
}

// Kernels learn of wider steps, and that there are none again; small codes come anew likewise.
TEST_F(CudaTimesSteps, Reload_BringsStepsOfEitherWidth) {
  for (const Form& form : kForms) {
    SCOPED_TRACE(form.name);
    const Steps other = steps_of(form).back();
    const MoeSpec spec = in_form(make_spec(4, 2, 520, 296, form.dtype), form);
    const Tensor hidden = random_tensor(DType::kBF16, 20, spec.hidden_size, 5);
    DeviceLayer reloaded(spec, source_of(spec, Steps::kNarrow), {.max_tokens = 64});
    const Tensor before = run(reloaded, hidden);
    DeviceLayer wide(spec, source_of(spec, other, 99), {.max_tokens = 64});
    reloaded.layer.reload(*wide.source, ReloadMode::kInPlace);
    EXPECT_TRUE(testing::same_bits(run(reloaded, hidden), run(wide, hidden)));
    reloaded.layer.reload(*source_of(spec, Steps::kNarrow), ReloadMode::kInPlace);
    EXPECT_TRUE(testing::same_bits(run(reloaded, hidden), before));
  }
}

// Slices of 256 columns begin with a unit; those of 96 hold float32 numbers.
TEST_F(CudaTimesSteps, Slices_AddUpToTheWhole) {
  for (const Form& form : kForms) {
    for (const int64_t columns : {256, 96}) {
      SCOPED_TRACE(std::string(form.name) + ", " + std::to_string(columns));
      const MoeSpec spec = in_form(make_spec(6, 2, 264, 2 * columns, form.dtype), form);
      const Tensor hidden = random_tensor(DType::kBF16, 20, spec.hidden_size, 5);
      const testing::GivenRouting routing = testing::random_routing(20, 6, 2, 9);
      Tensor total(DType::kF32, {20, spec.hidden_size});
      std::fill_n(total.as<float>(), 20 * spec.hidden_size, 0.0F);
      std::unique_ptr<DeviceLayer> last;
      for (int32_t rank = 0; rank < 2; ++rank) {
        last = std::make_unique<DeviceLayer>(
            spec, source_of(spec, Steps::kNarrow), LayerOptions{.max_tokens = 32},
            ParallelSpec{.tp_size = 2, .tp_rank = rank, .reduce = Reduce::kPartial});
        testing::DeviceForward forward(*last, hidden.view(), DType::kF32);
        forward.route_by(routing.ids, routing.weights);
        forward.enqueue();
        const Tensor part = forward.out();
        for (int64_t i = 0; i < 20 * spec.hidden_size; ++i) {
          total.as<float>()[i] += part.as<float>()[i];
        }
      }
      EXPECT_LE(testing::worst_error(*last, hidden, routing, total),
                accuracy_bar(form.dtype, DType::kBF16));
    }
  }
}

// The same kernels read what the reference kernel does, code by code.
TEST_F(CudaTimesSteps, SmallCodes_AreThoseOfTheReference) {
  for (const Form& form : kForms) {
    if (!form.is_small) continue;
    SCOPED_TRACE(form.name);
    MoeSpec spec = in_form(make_spec(3, 2, 520, 296, form.dtype), form);
    DeviceLayer owned(spec, source_of(spec, Steps::kNarrow),
                      {.max_tokens = 8, .kernel = "cuda.reference"});
    for (const int64_t tokens : {1, 7}) expect_accurate(owned, tokens);
  }
}

TEST_F(CudaTimesSteps, OthersBesideSmallCodes_AreRefused) {
  const Form small = kForms[3];
  const MoeSpec spec = in_form(make_spec(3, 2, 520, 296, small.dtype), small);
  Form wide = small;
  wide.is_small = false;
  const auto refusal = [&](const WeightSource& source) -> Error {
    try {
      const MoeLayer layer =
          MoeLayer::create(Context({.device = "cuda:0", .num_threads = 1}), spec, source, {});
    } catch (const Error& error) {
      return error;
    }
    return Error(ErrorCode::kState, {.what = "none"});
  };
  const Error codes = refusal(*source_of(in_form(spec, wide), Steps::kNarrow));
  EXPECT_EQ(codes.code(), ErrorCode::kTensorValue);
  EXPECT_EQ(codes.detail().expected, "values of U2");
  const Error steps = refusal(*source_of(spec, Steps::kWide));
  EXPECT_EQ(steps.code(), ErrorCode::kTensorValue);
  EXPECT_NE(steps.detail().expected.find("from 0 to 15"), std::string::npos);
}

// 256 codes have 16 steps and a unit, or twice as many; small ones have as many bytes as a file.
TEST_F(CudaTimesSteps, Memory_IsThatOfCodesAndBytes) {
  for (const Form& form : kForms) {
    SCOPED_TRACE(form.name);
    MoeSpec spec = in_form(make_spec(8, 2, 2048, 1024, form.dtype), form);
    spec.has_gate = false;
    const auto source = source_of(spec, Steps::kNarrow);
    const Context device({.device = "cuda:0", .num_threads = 1});
    testing::CountingAllocator counter(*device.device_allocator());
    const Context context({.device = "cuda:0", .num_threads = 1, .device_allocator = &counter});
    const MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_tokens = 64});
    const int64_t numbers = form.zeros == WeightZero::kNone ? 1 : 2;
    const int64_t bytes = form.is_small ? 64 + 16 + 4 : 128 + numbers * (16 + 4);
    const int64_t stored = int64_t{3} * 8 * 2048 * 1024 / 256 * bytes;
    EXPECT_LE(counter.all_bytes, stored + stored / 50);
  }
}

}  // namespace
}  // namespace conclave
