// Layers of several types, of which a matrix is known to have narrower codes: the same weights in
// less memory.
#include "experts/problem.h"
#include "layer/problems.h"
#include "layer/rank_part.h"
#include "support/in_sample.h"
#include "support/layer_fixture.h"

#include "conclave/gguf.h"
#include "conclave/placement.h"

#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
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
  bool only_bits = false;  // nothing else than the width of codes is known
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

constexpr auto kSteps = ScaleValues::kSteps;

QuantSpec groups_of(int64_t columns) {
  return {.weights = WeightScale::kBlock,
          .block_rows = 1,
          .block_cols = columns,
          .signed_scales = true};
}

// The first three as GGUF files mix types: Q4_K beside Q6_K, and beside Q5_0 where rows are no
// multiple of 256; IQ4_XS beside Q6_K.
std::vector<Case> cases() {
  std::vector<Case> cases;
  QuantSpec quant = groups_of(16);
  quant.scale_values = quant.zero_values = kSteps;
  quant.zeros = WeightZero::kOffset;
  quant.gate_up_codes = {.dtype = DType::kU4, .block_cols = 32};
  quant.down_codes = {.has_zeros = false};
  cases.push_back({"u4_beside_i8", DType::kI8, quant});
  quant.activations = ActivationScale::kGroup;
  quant.activation_group = 32;
  cases.push_back({"u4_beside_i8_with_coded_rows", DType::kI8, quant});

  quant = groups_of(32);
  quant.zeros = WeightZero::kOffset;
  quant.gate_up_codes = {.dtype = DType::kU4, .scale_values = kSteps, .zero_values = kSteps};
  quant.down_codes = {.has_zeros = false, .scale_values = ScaleValues::kF16};
  cases.push_back({"numbers_of_several_kinds", DType::kI8, quant});

  quant = groups_of(16);
  quant.scale_values = kSteps;
  quant.gate_up_codes = {.dtype = DType::kIQ4, .block_cols = 32};
  cases.push_back({"iq4_beside_i8", DType::kI8, quant});

  quant = groups_of(24);
  quant.zeros = WeightZero::kPoint;
  quant.down_codes = {.dtype = DType::kI4, .block_cols = 72};
  cases.push_back({"down_is_narrow", DType::kI8, quant});

  for (const WeightForm& form : gguf_mixed_forms()) {
    std::string name(form.name);
    name[name.find('+')] = '_';
    cases.push_back({name, form.dtype, form.quant});
  }

  for (const bool has_zeros : {false, true}) {
    for (const bool has_coded_rows : {false, true}) {
      quant = groups_of(16);
      quant.scale_values = kSteps;
      if (has_zeros) quant.zeros = WeightZero::kOffset;
      if (has_coded_rows) quant.activations = ActivationScale::kToken;
      quant.gate_up_codes = quant.down_codes = {.dtype = DType::kI6};
      cases.push_back({std::string("i6") + (has_zeros ? "_with_zeros" : "") +
                           (has_coded_rows ? "_with_coded_rows" : ""),
                       DType::kI8, quant, true});
    }
  }
  quant = {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken};
  quant.gate_up_codes = quant.down_codes = {.dtype = DType::kI6};
  cases.push_back({"i6_by_row_with_coded_rows", DType::kI8, quant, true});
  quant = groups_of(24);
  quant.zeros = WeightZero::kPoint;
  quant.has_column_order = true;
  quant.gate_up_codes = quant.down_codes = {.dtype = DType::kI6};
  cases.push_back({"i6_in_any_order", DType::kI8, quant, true});

  quant = {.weights = WeightScale::kChannel};
  quant.gate_up_codes = {.dtype = DType::kF4};
  cases.push_back({"e2m1_beside_e4m3_by_row", DType::kF8E4M3, quant});
  return cases;
}

constexpr int64_t kExperts = 3;
constexpr int64_t kHidden = 300;
constexpr int64_t kInner = 296;

class KnownCodesOfLayers : public ::testing::TestWithParam<Case> {
 protected:
  static MoeSpec spec_of(const QuantSpec& quant) {
    MoeSpec spec = make_spec(kExperts, 2, kHidden, kInner, GetParam().dtype);
    spec.quant = quant;
    return spec;
  }
  static MoeSpec known() { return spec_of(GetParam().quant); }
  static MoeSpec unknown() {
    QuantSpec quant = GetParam().quant;
    quant.gate_up_codes = {};
    quant.down_codes = {};
    return spec_of(quant);
  }
};

void expect_accurate(const Context& context, const MoeSpec& spec, const WeightSource& source,
                     const ConstTensorView& hidden, const testing::LayerOutput& output) {
  const StageCheck check = check_against_reference(context, spec, source, output.result(hidden));
  EXPECT_EQ(check.routing_mismatches, 0);
  EXPECT_LE(check.worst_token_error, accuracy_bar(spec.weight_dtype, DType::kBF16));
}

TEST_P(KnownCodesOfLayers, EveryArithmetic_HasTheSameWeightsInLessMemory) {
  const auto source = make_synthetic_source(known(), 5);
  size_t place = testing::first_place();
  for (const std::string& isa : testing::usable_isas()) {
    const Context context({.num_threads = 2, .isa = isa});
    for (const char* arithmetic : {"f32_fma", "dpbf16", "amx_bf16", "int8_dot"}) {
      if (!testing::in_sample(place++, 5)) continue;
      const auto layer = layer_of(context, known(), *source, arithmetic);
      const auto expected = layer_of(context, unknown(), *source, arithmetic);
      ASSERT_EQ(layer.has_value(), expected.has_value());
      ASSERT_TRUE(layer || std::strcmp(arithmetic, "f32_fma") != 0);
      if (!layer) continue;
      EXPECT_LT(layer->plan().packed_bytes, expected->plan().packed_bytes);
      for (const int64_t tokens : {2, 14, 70}) {
        if (isa == "scalar" && tokens > 2) continue;  // the reference is slow
        SCOPED_TRACE(isa + " " + arithmetic + " T" + std::to_string(tokens));
        const Tensor hidden = random_tensor(DType::kBF16, tokens, kHidden, 6);
        const auto output = run_layer(*layer, hidden.view(), DType::kF32);
        expect_accurate(context, known(), *source, hidden.view(), output);
        if (GetParam().only_bits) {
          EXPECT_TRUE(same_bits(output.out, run_layer(*expected, hidden.view(), DType::kF32).out));
        }
        // Weights are made one by one: groups of sums do not matter.
        if (std::strcmp(arithmetic, "f32_fma") != 0) continue;
        if (GetParam().quant.activations != ActivationScale::kNone) continue;
        EXPECT_TRUE(same_bits(output.out, run_layer(*expected, hidden.view(), DType::kF32).out));
      }
    }
  }
}

// Slices begin within a wide group, and within the columns that share a unit.
TEST_P(KnownCodesOfLayers, SlicesAnywhere_HaveTheBitsOfTheLayersForm) {
  if (GetParam().quant.activations != ActivationScale::kNone) return;
  const auto source = make_synthetic_source(known(), 7);
  const Context context({.num_threads = 2});
  const Tensor hidden = random_tensor(DType::kBF16, 5, kHidden, 8);
  for (const int32_t ranks : {2, 3}) {
    for (int32_t rank = 0; rank < ranks; ++rank) {
      const ParallelSpec part{.tp_size = ranks, .tp_rank = rank, .reduce = Reduce::kPartial};
      const auto layer = layer_of(context, known(), *source, "f32_fma", part);
      const auto expected = layer_of(context, unknown(), *source, "f32_fma", part);
      ASSERT_TRUE(layer && expected);
      EXPECT_TRUE(same_bits(run_layer(*layer, hidden.view(), DType::kF32).out,
                            run_layer(*expected, hidden.view(), DType::kF32).out))
          << rank << " of " << ranks;
    }
  }
}

TEST_P(KnownCodesOfLayers, Reloads_ReplaceThem) {
  const Context context({.num_threads = 2});
  const auto first = make_synthetic_source(known(), 9);
  const auto second = make_synthetic_source(known(), 10);
  const MoeLayer expected = MoeLayer::create(context, known(), *second);
  const Tensor hidden = random_tensor(DType::kBF16, 3, kHidden, 8);
  for (const ReloadMode mode : {ReloadMode::kStaged, ReloadMode::kInPlace}) {
    MoeLayer layer = MoeLayer::create(context, known(), *first);
    layer.reload(*second, mode);
    EXPECT_TRUE(same_bits(run_layer(layer, hidden.view(), DType::kF32).out,
                          run_layer(expected, hidden.view(), DType::kF32).out));
  }
}

// A GPU's kernels and memory follow from these problems.
TEST_P(KnownCodesOfLayers, GpusSolveTheProblemsOfLayersOfWhichNothingIsKnown) {
  for (const ParallelSpec& parallel : {ParallelSpec{}, ParallelSpec{.tp_size = 3, .tp_rank = 1}}) {
    const auto problem_of = [&](const MoeSpec& spec, const experts::Target& target) {
      const RankPart part = plan_rank_part(spec, parallel);
      return mlp_problems({.spec = spec, .part = part, .max_tokens = 8, .target = target}).routed;
    };
    const auto own = problem_of(known(), cuda::DeviceInfo{});
    const auto expected = problem_of(unknown(), cuda::DeviceInfo{});
    EXPECT_EQ(own.weight_dtype, expected.weight_dtype);
    EXPECT_EQ(own.quant, expected.quant);
    EXPECT_EQ(own.skipped_columns, expected.skipped_columns);
    EXPECT_EQ(own.skipped_rows, expected.skipped_rows);
    EXPECT_NE(problem_of(known(), experts::CpuTarget{}).quant, expected.quant);
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, KnownCodesOfLayers, ::testing::ValuesIn(cases()),
                         [](const auto& tested) { return tested.param.name; });

// One element of a plane of expert 1 is another: the first of a row.
class OneOther final : public WeightSource {
 public:
  OneOther(const WeightSource& source, WeightId id, int64_t row, std::vector<std::byte> bytes)
      : source_(source), id_(id), row_(row), bytes_(std::move(bytes)) {}

  WeightInfo describe(WeightId id) const override { return source_.describe(id); }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    source_.read(id, expert, block, destination);
    if (id != id_ || expert != 1 || row_ < block.row_begin || row_ >= block.row_end) return;
    const size_t row_bytes =
        destination.size() / static_cast<size_t>(block.row_end - block.row_begin);
    const auto row = static_cast<size_t>(row_ - block.row_begin);
    std::memcpy(destination.data() + row * row_bytes, bytes_.data(), bytes_.size());
  }
  std::string locate(WeightId id, int64_t expert) const override {
    return source_.locate(id, expert) + " of expert " + std::to_string(expert);
  }

 private:
  const WeightSource& source_;
  WeightId id_;
  int64_t row_;
  std::vector<std::byte> bytes_;
};

template <class T>
std::vector<std::byte> bytes_of(T value) {
  std::vector<std::byte> bytes(sizeof(T));
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

TEST(KnownCodesThatAreOthers, AreRefusedByTensorAndValue) {
  MoeSpec spec = make_spec(2, 1, 128, 64, DType::kI8);
  spec.quant = cases()[2].quant;
  spec.quant.gate_up_codes.block_cols = 64;
  const auto source = make_synthetic_source(spec, 3);
  const Context context({.num_threads = 2});
  const auto refusal = [&](WeightId id, int64_t row, std::vector<std::byte> bytes) {
    const OneOther other(*source, id, row, std::move(bytes));
    try {
      static_cast<void>(MoeLayer::create(context, spec, other));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kTensorValue);
      EXPECT_NE(error.detail().tensor.find("of expert 1"), std::string::npos) << error.what();
      return std::string(error.what());
    }
    ADD_FAILURE();
    return std::string();
  };
  const std::string code = refusal(weights::kUp, 5, bytes_of<int8_t>(16));
  EXPECT_NE(code.find("16 in row 5, column 0"), std::string::npos) << code;
  EXPECT_NE(code.find("U4"), std::string::npos) << code;
  EXPECT_NE(refusal(weights::kGate, 0, bytes_of<int8_t>(-1)).find("-1 in row 0"),
            std::string::npos);
  const std::string zero =
      refusal(weights::kDown.with(WeightPlane::kZero), 3, bytes_of<float>(0.5F));
  EXPECT_NE(zero.find("no zeros but 0"), std::string::npos) << zero;
  const std::string group =
      refusal(weights::kUp.with(WeightPlane::kScale), 2, bytes_of<float>(0.0F));
  EXPECT_NE(group.find("64 neighbouring columns"), std::string::npos) << group;
  spec.quant.gate_up_codes.dtype = DType::kI6;
  const std::string six = refusal(weights::kUp, 5, bytes_of<int8_t>(32));
  EXPECT_NE(six.find("32 in row 5, column 0"), std::string::npos) << six;
  EXPECT_NE(six.find("I6"), std::string::npos) << six;
  EXPECT_NO_THROW(static_cast<void>(
      MoeLayer::create(context, spec, OneOther(*source, weights::kUp, 5, bytes_of<int8_t>(-32)))));
  spec.quant.gate_up_codes.dtype = DType::kU4;
  EXPECT_NO_THROW(static_cast<void>(
      MoeLayer::create(context, spec, OneOther(*source, weights::kUp, 5, bytes_of<int8_t>(15)))));
}

// No panel has codes of 2 bits: they are checked, and held as those of the layer.
TEST(KnownCodes, CodesOfTwoBits_AreThoseOfTheLayerInPanels) {
  for (const DType dtype : {DType::kI4, DType::kU4}) {
    SCOPED_TRACE(to_string(dtype));
    MoeSpec spec = make_spec(3, 2, 300, 296, dtype);
    spec.quant = groups_of(16);
    spec.quant.scale_values = spec.quant.zero_values = kSteps;
    spec.quant.zeros = WeightZero::kOffset;
    MoeSpec unknown = spec;
    spec.quant.gate_up_codes.dtype = spec.quant.down_codes.dtype = DType::kU2;
    const auto source = make_synthetic_source(spec, 5);
    const Context context({.num_threads = 2});
    const MoeLayer layer = MoeLayer::create(context, spec, *source);
    const MoeLayer expected = MoeLayer::create(context, unknown, *source);
    EXPECT_EQ(layer.plan().packed_bytes, expected.plan().packed_bytes);
    const Tensor hidden = testing::random_tensor(DType::kBF16, 14, 300, 3);
    const auto output = run_layer(layer, hidden.view(), DType::kF32);
    EXPECT_TRUE(same_bits(output.out, run_layer(expected, hidden.view(), DType::kF32).out));
    expect_accurate(context, spec, *source, hidden.view(), output);
    // Two codes, of which the first stands for 4.
    const auto four = static_cast<uint8_t>(dtype == DType::kI4 ? 0x8c : 0x04);
    const OneOther other(*source, weights::kUp, 5, bytes_of<uint8_t>(four));
    try {
      static_cast<void>(MoeLayer::create(context, spec, other));
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kTensorValue);
      const std::string text = error.what();
      EXPECT_NE(text.find("4 in row 5, column 0"), std::string::npos) << text;
      EXPECT_NE(text.find("U2"), std::string::npos) << text;
    }
  }
}

}  // namespace
}  // namespace conclave
