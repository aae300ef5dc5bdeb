// Layers whose scales take fewer bytes than float32: every bit is as if they did not.
#include "layer/float_scales.h"
#include "support/layer_fixture.h"

#include "conclave/gguf.h"
#include "conclave/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::layer_of;
using testing::make_spec;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

struct Case {
  std::string name;
  DType dtype;
  QuantSpec quant;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// The forms that GGUF files have, each once, and those with rows in codes.
std::vector<Case> cases() {
  std::vector<Case> cases;
  for (const WeightForm& form : gguf_block_forms()) {
    const bool known = std::ranges::any_of(cases, [&](const Case& other) {
      return other.dtype == form.dtype && other.quant == form.quant;
    });
    if (known) continue;
    cases.push_back({std::string(form.name), form.dtype, form.quant});
    QuantSpec rows = form.quant;
    rows.activations = ActivationScale::kGroup;
    rows.activation_group = 32;
    rows.activation_dtype = DType::kI8;
    cases.push_back({std::string(form.name) + "_rows", form.dtype, rows});
  }
  return cases;
}

QuantSpec with_floats(QuantSpec quant) {
  quant.scale_values = ScaleValues::kFloat;
  quant.zero_values = ScaleValues::kFloat;
  return quant;
}

constexpr int64_t kExperts = 2;
constexpr int64_t kHidden = 300;

class NarrowScales : public ::testing::TestWithParam<Case> {
 protected:
  static MoeSpec spec(const QuantSpec& quant) {
    MoeSpec spec = make_spec(kExperts, 1, kHidden, 296, GetParam().dtype);
    spec.quant = quant;
    return spec;
  }
  MoeSpec narrow() const { return spec(GetParam().quant); }
  MoeSpec wide() const { return spec(with_floats(GetParam().quant)); }
};

TEST_P(NarrowScales, EveryArithmetic_HasTheBitsOfFloat32) {
  const auto source = std::make_unique<testing::FloatScales>(make_synthetic_source(narrow(), 5));
  const std::vector<std::string> isas = testing::usable_isas();
  for (const std::string& isa : isas) {
    const Context context({.num_threads = 2, .isa = isa});
    for (const char* arithmetic : {"f32_fma", "dpbf16", "amx_bf16", "int8_dot"}) {
      const auto expected = layer_of(context, wide(), *source, arithmetic);
      const auto layer = layer_of(context, narrow(), *source, arithmetic);
      ASSERT_EQ(layer.has_value(), expected.has_value());
      ASSERT_TRUE(layer || std::strcmp(arithmetic, "f32_fma") != 0);
      if (!layer) continue;
      EXPECT_LT(layer->plan().packed_bytes, expected->plan().packed_bytes);
      for (const int64_t tokens : {2, 14}) {
        if (isa == "scalar" && tokens > 2) continue;  // the reference is slow
        SCOPED_TRACE(isa + " " + arithmetic + " T" + std::to_string(tokens));
        const Tensor hidden = random_tensor(DType::kBF16, tokens, kHidden, 6);
        EXPECT_TRUE(same_bits(run_layer(*layer, hidden.view(), DType::kF32).out,
                              run_layer(*expected, hidden.view(), DType::kF32).out));
      }
    }
  }
}

// Slices begin within the columns that share a unit, within a group, and on a boundary of both.
TEST_P(NarrowScales, SlicesAnywhere_HaveTheBitsOfFloat32) {
  const auto source = std::make_unique<testing::FloatScales>(make_synthetic_source(narrow(), 7));
  const Context context({.num_threads = 2});
  const Tensor hidden = random_tensor(DType::kBF16, 5, kHidden, 8);
  for (const int32_t ranks : {2, 3}) {
    for (int32_t rank = 0; rank < ranks; ++rank) {
      const ParallelSpec part{.tp_size = ranks, .tp_rank = rank, .reduce = Reduce::kPartial};
      const auto layer = layer_of(context, narrow(), *source, "", part);
      const auto expected = layer_of(context, wide(), *source, "", part);
      ASSERT_TRUE(layer && expected);
      EXPECT_TRUE(same_bits(run_layer(*layer, hidden.view(), DType::kF32).out,
                            run_layer(*expected, hidden.view(), DType::kF32).out))
          << rank << " of " << ranks;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, NarrowScales, ::testing::ValuesIn(cases()),
                         [](const auto& tested) { return tested.param.name; });

// One scale of one matrix is another number.
class OneOtherScale final : public WeightSource {
 public:
  OneOtherScale(const WeightSource& source, WeightId id, float value)
      : source_(source), id_(id), value_(value) {}

  WeightInfo describe(WeightId id) const override { return source_.describe(id); }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    source_.read(id, expert, block, destination);
    if (id != id_ || expert != 2 || block.row_begin > 3 || block.row_end <= 3) return;
    const auto at = static_cast<size_t>((3 - block.row_begin) * (block.col_end - block.col_begin));
    std::memcpy(destination.data() + at * sizeof(float), &value_, sizeof(float));
  }
  std::string locate(WeightId id, int64_t expert) const override {
    return source_.locate(id, expert) + " of expert " + std::to_string(expert);
  }

 private:
  const WeightSource& source_;
  WeightId id_;
  float value_;
};

TEST(NarrowScalesOfOtherValues, AreRefusedByName) {
  const Context context({.num_threads = 2});
  const auto refusal = [&](ScaleValues values, WeightId id, float value) -> std::optional<Error> {
    MoeSpec spec = make_spec(4, 2, 256, 128, DType::kI8);
    spec.quant = {.weights = WeightScale::kBlock,
                  .block_rows = 1,
                  .block_cols = 32,
                  .signed_scales = true,
                  .scale_values = values};
    const auto source = make_synthetic_source(spec, 3);
    const OneOtherScale other(*source, id.with(WeightPlane::kScale), value);
    try {
      static_cast<void>(MoeLayer::create(context, spec, other));
    } catch (const Error& error) {
      return error;
    }
    return std::nullopt;
  };
  for (const WeightId id : {weights::kUp, weights::kDown}) {
    for (const auto& [values, value] : {std::pair{ScaleValues::kF16, 0.1F},
                                        {ScaleValues::kPowerOfTwo, 3.0F},
                                        {ScaleValues::kSteps, 0.1F}}) {
      const auto error = refusal(values, id, value);
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code(), ErrorCode::kTensorValue);
      EXPECT_NE(error->detail().tensor.find("of expert 2"), std::string::npos) << error->what();
      EXPECT_FALSE(error->detail().expected.empty());
    }
    EXPECT_FALSE(refusal(ScaleValues::kFloat, id, 0.1F));
  }
}

}  // namespace
}  // namespace conclave
