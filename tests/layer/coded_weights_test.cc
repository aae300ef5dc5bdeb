// Compares layers with weights of every format of codes, with scales of every form, with float64 on
// the same codes and scales.
#include "cpu/isa.h"
#include "layer/coded_specs.h"
#include "quant/activation_rows.h"
#include "quant/weight_format.h"
#include "support/in_sample.h"
#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::coded_spec;
using testing::coded_types;
using testing::e4m3_spec;
using testing::make_layer;
using testing::make_spec;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::row_bytes;
using testing::run_layer;
using testing::same_bits;

void expect_accurate(const OwnedLayer& owned, const Tensor& hidden, DType out_dtype) {
  const auto output = run_layer(owned.layer, hidden.view(), out_dtype);
  const StageCheck check = check_against_reference(*owned.context, owned.layer.spec(),
                                                   *owned.source, output.result(hidden.view()));
  EXPECT_EQ(check.routing_mismatches, 0);
  EXPECT_LE(check.worst_token_error, accuracy_bar(owned.layer.spec().weight_dtype, out_dtype));
}

struct Form {
  const char* name;
  QuantSpec quant;
};
// A format with scales of a form.
struct Weights {
  DType type;
  Form form;
};
std::string name_of(const Weights& weights) {
  return std::string(quant::format_of(weights.type).name) + "_" + weights.form.name;
}
void PrintTo(const Weights& weights, std::ostream* out) { *out << name_of(weights); }

constexpr auto kTensor = WeightScale::kTensor;
constexpr auto kChannel = WeightScale::kChannel;
constexpr auto kBlock = WeightScale::kBlock;
using enum ActivationScale;

class CodedWeights : public ::testing::TestWithParam<Weights> {
 protected:
  MoeSpec spec(int64_t experts, int64_t top_k, int64_t hidden, int64_t inner) const {
    return coded_spec(GetParam().type, experts, top_k, hidden, inner, GetParam().form.quant);
  }
  bool takes_offsets_from_sums() const {
    const QuantSpec& quant = GetParam().form.quant;
    return quant.zeros != WeightZero::kNone && quant.activations != kNone;
  }
  // Rows of whole numbers have an arithmetic of their own, pairs of columns share a scale.
  bool is_exact_or_odd(const QuantSpec& quant) const {
    if (quant.activations == kNone) return false;
    const quant::ActivationRule rule = quant::activation_rule(GetParam().type, quant);
    return rule.is_exact() || (quant.activations == ActivationScale::kGroup && rule.group % 2 != 0);
  }
  // The layer under every arithmetic that takes its rows, on this CPU.
  std::vector<OwnedLayer> layers(const MoeSpec& spec, LayerOptions options = {}) const {
    std::vector<OwnedLayer> layers;
    options.arithmetic = "f32_fma";
    layers.push_back(make_layer(spec, options));
    const QuantSpec& quant = GetParam().form.quant;
    const std::vector<std::string> isas = testing::usable_isas();
    const bool is_whole = quant.activations != kNone && !quant.has_column_factors &&
                          quant::activation_rule(GetParam().type, quant).is_exact();
    // Float32 of 512 bits is faster than integers of 256.
    const bool has_integers = std::ranges::count(isas, "avx512_vnni") == 1 ||
                              (std::ranges::count(isas, "avx2") == 1 && isas.back() == "avx2");
    if (is_whole && has_integers) {
      options.arithmetic.clear();
      layers.push_back(make_layer(spec, options));
      EXPECT_EQ(layers.back().layer.plan().arithmetic, "int8_dot");
    }
    const bool has_wide_zeros =
        quant.zeros != WeightZero::kNone && !(quant.weights == kBlock && quant.block_rows == 1);
    const bool plain_rows = quant.activations == kNone;
    if (is_exact_or_odd(quant) || quant.has_column_order ||
        (plain_rows && quant.has_column_factors) || has_wide_zeros || !cpu::permutes_bytes()) {
      return layers;
    }
    if (std::find(isas.begin(), isas.end(), "avx512_bf16") == isas.end()) return layers;
    options.arithmetic = "dpbf16";
    layers.push_back(make_layer(spec, options));
    EXPECT_EQ(layers.back().layer.plan().arithmetic, "dpbf16");
    return layers;
  }
};

TEST_P(CodedWeights, EveryShape_IsWithinTheBar) {
  struct Case {
    int64_t experts, top_k, hidden, inner, tokens;
  };
  size_t place = testing::first_place();
  for (const Case& c :
       {Case{8, 2, 256, 128, 17}, Case{6, 3, 300, 130, 9}, Case{10, 1, 127, 129, 33},
        Case{60, 5, 96, 40, 21}, Case{1, 1, 1, 1, 3}, Case{3, 3, 65, 257, 1}}) {
    if (!testing::in_sample(place++, 3)) continue;
    SCOPED_TRACE(::testing::Message() << "E" << c.experts << " k" << c.top_k << " H" << c.hidden
                                      << " I" << c.inner << " T" << c.tokens);
    // Offsets are taken from sums: those of a single weight may leave nothing but rounding.
    if (takes_offsets_from_sums() && c.hidden == 1) continue;
    for (const OwnedLayer& owned : layers(spec(c.experts, c.top_k, c.hidden, c.inner))) {
      const bool widens =
          owned.layer.plan().arithmetic != "dpbf16" || GetParam().form.quant.activations != kNone;
      for (const DType dtype : {DType::kBF16, DType::kF32}) {
        // The other arithmetic rounds rows of float32 to bf16 before all else.
        const DType rows = widens ? dtype : DType::kBF16;
        expect_accurate(owned, random_tensor(rows, c.tokens, c.hidden, 3), dtype);
      }
    }
  }
}

TEST_P(CodedWeights, PartsOfALayer_AreWithinTheBar) {
  MoeSpec with_shared = spec(6, 2, 136, 72);
  with_shared.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 150};
  MoeSpec with_plain_shared = with_shared;
  with_plain_shared.shared.weight_dtype = DType::kBF16;
  MoeSpec biased = spec(6, 2, 136, 72);
  biased.has_bias = true;
  biased.activation = {.name = "swiglu_oai", .limit = 7, .alpha = 1.702, .beta = 1};
  MoeSpec single = spec(6, 2, 136, 72);
  single.activation.name = "relu2_no_mul";
  MoeSpec residual = spec(6, 2, 136, 72);
  residual.residual = {.intermediate_size = 40, .weight_dtype = DType::kBF16};
  MoeSpec on_input = spec(6, 3, 136, 72);
  on_input.weight_on = WeightOn::kInput;
  MoeSpec latent = spec(6, 2, 136, 72);
  latent.latent.size = 130;
  for (const MoeSpec& part :
       {with_shared, with_plain_shared, biased, single, residual, on_input, latent}) {
    for (const OwnedLayer& owned : layers(part)) {
      SCOPED_TRACE(owned.layer.plan().arithmetic);
      expect_accurate(owned, random_tensor(DType::kBF16, 19, 136, 4), DType::kBF16);
    }
  }
}

TEST_P(CodedWeights, BatchAroundAToken_ChangesNoBit) {
  const Tensor hidden = random_tensor(DType::kBF16, 40, 200, 5);
  for (const OwnedLayer& owned : layers(spec(6, 3, 200, 136), {.max_tokens = 16})) {
    const auto all = run_layer(owned.layer, hidden.view(), DType::kBF16);
    for (const int64_t token : {0, 17, 39}) {
      const Tensor one = testing::gather_rows(hidden, {token});
      const auto alone = run_layer(owned.layer, one.view(), DType::kBF16);
      EXPECT_EQ(row_bytes(alone.out, 0), row_bytes(all.out, token)) << token;
    }
  }
}

TEST_P(CodedWeights, NoTokens_IsLegal) {
  const OwnedLayer owned = make_layer(spec(4, 2, 64, 32));
  const Tensor hidden(DType::kBF16, {0, 64});
  EXPECT_NO_THROW(run_layer(owned.layer, hidden.view(), DType::kBF16));
}

TEST_P(CodedWeights, NotFiniteToken_TouchesNoOther) {
  const OwnedLayer owned = make_layer(spec(4, 2, 200, 64));
  Tensor hidden = random_tensor(DType::kF32, 5, 200, 6);
  // The routing is given, so that the token still has experts.
  std::vector<int32_t> ids = {0, 1, 1, 2, 0, 3, 2, 3, 1, 0};
  std::vector<float> weights(ids.size(), 0.5F);
  const ForwardArgs args{.topk_ids = {.data = ids.data(), .dtype = DType::kI32, .shape = {5, 2}},
                         .topk_weights = {.data = weights.data(), .shape = {5, 2}}};
  const auto clean = run_layer(owned.layer, hidden.view(), DType::kF32, args);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    hidden.as<float>()[2 * 200 + 130] = bad;
    const auto output = run_layer(owned.layer, hidden.view(), DType::kF32, args);
    for (const int64_t token : {0, 1, 3, 4}) {
      EXPECT_EQ(row_bytes(output.out, token), row_bytes(clean.out, token)) << token;
    }
    const float* row = output.out.as<float>() + 2 * 200;
    EXPECT_FALSE(std::isfinite(std::accumulate(row, row + 200, 0.0F))) << bad;
  }
}

// The check must detect a wrong code anywhere: scales of another block are a frequent fault. So
// must it zeros and orders.
TEST_P(CodedWeights, AnotherSourcesPlanes_AreSeen) {
  const OwnedLayer owned = make_layer(spec(2, 2, 256, 256));
  const Tensor hidden = random_tensor(DType::kBF16, 4, 256, 3);
  const auto output = run_layer(owned.layer, hidden.view(), DType::kF32);
  const auto other = make_synthetic_source(owned.layer.spec(), 12);
  struct OtherPlane final : WeightSource {
    const WeightSource& base;
    const WeightSource& other;
    WeightId id;
    OtherPlane(const WeightSource& a, const WeightSource& b, WeightId of)
        : base(a), other(b), id(of) {}
    WeightInfo describe(WeightId role) const override { return base.describe(role); }
    void read(WeightId role, int64_t expert, const WeightBlock& block,
              std::span<std::byte> destination) const override {
      (role == id ? other : base).read(role, expert, block, destination);
    }
  };
  for (const WeightPlane plane :
       {WeightPlane::kScale, WeightPlane::kZero, WeightPlane::kGlobalScale,
        WeightPlane::kColumnOrder, WeightPlane::kColumnFactor}) {
    const WeightId id = weights::kDown.with(plane);
    if (owned.source->describe(id).count == 0) continue;
    const OtherPlane mixed(*owned.source, *other, id);
    const StageCheck check = check_against_reference(*owned.context, owned.layer.spec(), mixed,
                                                     output.result(hidden.view()));
    EXPECT_GT(check.worst_token_error, accuracy_bar(GetParam().type, DType::kF32)) << to_string(id);
  }
}

QuantSpec mx_rows(DType rows, RowScaleRule rule) {
  return {.weights = kBlock,
          .block_rows = 1,
          .block_cols = 32,
          .activations = kGroup,
          .activation_group = 32,
          .activation_dtype = rows,
          .activation_scale_rule = rule};
}

QuantSpec nvfp4_rows(bool has_factors) {
  return {.weights = kBlock,
          .block_rows = 1,
          .block_cols = 16,
          .activations = kGroup,
          .activation_group = 16,
          .activation_dtype = DType::kF4,
          .activation_scale_rule = RowScaleRule::kTwoLevel,
          .has_global_scale = true,
          .has_column_factors = has_factors};
}

std::vector<Weights> every_format_in_every_form() {
  const std::vector<Form> forms = {
      {"tensor", {.weights = kTensor}},
      {"tensor_static", {.weights = kTensor, .activations = kTensorStatic}},
      {"tensor_token", {.weights = kTensor, .activations = kToken}},
      {"channel", {.weights = kChannel}},
      {"channel_token", {.weights = kChannel, .activations = kToken}},
      {"channel_static", {.weights = kChannel, .activations = kTensorStatic}},
      {"block", {.weights = kBlock}},
      {"block_group", {.weights = kBlock, .activations = kGroup}},
      {"block_group_ue8m0",
       {.weights = kBlock, .activations = kGroup, .power_of_two_scales = true}},
      {"block_odd_group",
       {.weights = kBlock, .block_rows = 24, .block_cols = 40, .activations = kGroup}},
      {"channel_group32", {.weights = kChannel, .activations = kGroup, .activation_group = 32}},
      {"row_group16_group48",
       {.weights = kBlock,
        .block_rows = 1,
        .block_cols = 16,
        .activations = kGroup,
        .activation_group = 48}},
      {"row_group32_int8_rows",
       {.weights = kBlock,
        .block_rows = 1,
        .block_cols = 32,
        .activations = kGroup,
        .activation_group = 32,
        .activation_dtype = DType::kI8}},
      {"row_group32_mxfp4_rows", mx_rows(DType::kF4, RowScaleRule::kEvenPower)},
      {"row_group32_e2m3_rows", mx_rows(DType::kF6E2M3, RowScaleRule::kEvenPower)},
      {"row_group32_e3m2_rows", mx_rows(DType::kF6E3M2, RowScaleRule::kFloorPower)},
      {"row_group32_e2m3_rows_up", mx_rows(DType::kF6E2M3, RowScaleRule::kCeilPower)},
      {"row_group32_mxfp8_rows", mx_rows(DType::kF8E4M3, RowScaleRule::kHalfPower)},
      {"row_group32_e5m2_rows", mx_rows(DType::kF8E5M2, RowScaleRule::kFloorPower)},
      {"row_group16_nvfp4_rows", nvfp4_rows(false)},
      {"row_group16_nvfp4_rows_factors", nvfp4_rows(true)},
      {"row_group32_point_int8_rows",
       {.weights = kBlock,
        .block_rows = 1,
        .block_cols = 32,
        .activations = kGroup,
        .activation_group = 32,
        .activation_dtype = DType::kI8,
        .zeros = WeightZero::kPoint}},
      {"channel_point_token",
       {.weights = kChannel, .activations = kToken, .zeros = WeightZero::kPoint}},
      {"row_group32_e4m3_token",
       {.weights = kBlock,
        .block_rows = 1,
        .block_cols = 32,
        .activations = kToken,
        .activation_dtype = DType::kF8E4M3}},
      {"channel_e4m3_static",
       {.weights = kChannel, .activations = kTensorStatic, .activation_dtype = DType::kF8E4M3}},
      {"row_group24_offset_token",
       {.weights = kBlock,
        .block_rows = 1,
        .block_cols = 24,
        .activations = kToken,
        .zeros = WeightZero::kOffset}},
      {"channel_offset_static",
       {.weights = kChannel, .activations = kTensorStatic, .zeros = WeightZero::kOffset}},
      {"block_token", {.weights = kBlock, .activations = kToken}},
      {"row_group32", {.weights = kBlock, .block_rows = 1, .block_cols = 32}},
      {"row_group128", {.weights = kBlock, .block_rows = 1}},
      {"row_group16_global",
       {.weights = kBlock, .block_rows = 1, .block_cols = 16, .has_global_scale = true}},
      {"tensor_point", {.weights = kTensor, .zeros = WeightZero::kPoint}},
      {"channel_offset", {.weights = kChannel, .zeros = WeightZero::kOffset}},
      {"block_point", {.weights = kBlock, .zeros = WeightZero::kPoint}},
      {"block_group_global", {.weights = kBlock, .activations = kGroup, .has_global_scale = true}},
      {"row_group32_offset_global",
       {.weights = kBlock,
        .block_rows = 1,
        .block_cols = 32,
        .zeros = WeightZero::kOffset,
        .has_global_scale = true}},
      {"row_group24_order",
       {.weights = kBlock, .block_rows = 1, .block_cols = 24, .has_column_order = true}},
      {"row_group32_point_order",
       {.weights = kBlock,
        .block_rows = 1,
        .block_cols = 32,
        .zeros = WeightZero::kPoint,
        .has_column_order = true}},
      {"row_group32_factors",
       {.weights = kBlock, .block_rows = 1, .block_cols = 32, .has_column_factors = true}},
      {"tensor_static_factors",
       {.weights = kTensor, .activations = kTensorStatic, .has_column_factors = true}},
      {"channel_token_factors",
       {.weights = kChannel, .activations = kToken, .has_column_factors = true}},
      {"block_group_factors",
       {.weights = kBlock, .activations = kGroup, .has_column_factors = true}},
      {"row_group24_all",
       {.weights = kBlock,
        .block_rows = 1,
        .block_cols = 24,
        .zeros = WeightZero::kOffset,
        .has_global_scale = true,
        .has_column_order = true,
        .has_column_factors = true}}};
  std::vector<Weights> all;
  for (const DType type : coded_types()) {
    for (const Form& form : forms) {
      const bool has_both =
          form.quant.zeros != WeightZero::kNone && form.quant.activations != kNone;
      const bool int8_rows = form.quant.activation_dtype == DType::kI8;
      if (int8_rows && !quant::takes_int8_rows(type)) continue;
      if (has_both && !quant::activation_rule(type, form.quant).is_exact()) continue;
      if (quant::format_of(type).takes(form.quant)) all.push_back({type, form});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Catalog, CodedWeights, ::testing::ValuesIn(every_format_in_every_form()),
                         [](const auto& test) { return name_of(test.param); });

// Some codes lie on a boundary: with enough rows, float32 sums choose another code somewhere.
TEST(AmbiguousCodes, ManyTokens_AreWithinTheBarAndFewAreAllowedMore) {
  const OwnedLayer owned =
      make_layer(e4m3_spec(8, 2, 256, 128, {.weights = kBlock, .activations = kGroup}));
  const Tensor hidden = random_tensor(DType::kF32, 1500, 256, 8);
  const auto output = run_layer(owned.layer, hidden.view(), DType::kF32);
  const StageCheck check = check_against_reference(*owned.context, owned.layer.spec(),
                                                   *owned.source, output.result(hidden.view()));
  EXPECT_LE(check.worst_token_error, accuracy_bar(DType::kF8E4M3, DType::kF32));
  // A token has 2 x 128 values, of which a share 2 d / 0.09 is ambiguous.
  EXPECT_GT(check.ambiguous_tokens, 0);
  EXPECT_LT(check.ambiguous_tokens, 1500 / 2);
}

TEST(AmbiguousCodes, Allowance_GrowsWithTheAmbiguity) {
  for (const QuantSpec& quant :
       {QuantSpec{.weights = kChannel, .activations = kToken},
        QuantSpec{.weights = kBlock, .activations = kGroup, .power_of_two_scales = true},
        QuantSpec{.weights = kTensor, .activations = kTensorStatic}}) {
    MoeSpec spec = e4m3_spec(4, 2, 128, 160, quant);
    spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 70};
    const Context context({.num_threads = 2});
    const auto source = make_synthetic_source(spec, 5);
    const Tensor hidden = random_tensor(DType::kBF16, 30, 128, 6);
    const auto total = [&](double ambiguity) {
      const ReferenceResult result = reference_forward(
          context, spec, *source, {.hidden = hidden.view(), .code_ambiguity = ambiguity});
      EXPECT_EQ(result.allowance.size(), 30U);
      return std::accumulate(result.allowance.begin(), result.allowance.end(), 0.0);
    };
    EXPECT_EQ(total(0), 0);
    EXPECT_EQ(code_ambiguity(context), kFloat32CodeAmbiguity) << "a CPU adds in float32";
    const double tensor_core = total(kTensorCoreCodeAmbiguity);
    EXPECT_GT(tensor_core, total(kFloat32CodeAmbiguity));
    // A move of 0.09 for 4 % of the elements is a small part of the output.
    double length = 0;
    const ReferenceResult result =
        reference_forward(context, spec, *source, {.hidden = hidden.view()});
    for (const double value : result.output) length += value * value;
    EXPECT_LT(tensor_core, 0.1 * std::sqrt(length * 30));
  }
}

TEST(AmbiguousCodes, PlainRows_HaveNone) {
  const Context context({.num_threads = 1});
  for (const MoeSpec& spec :
       {e4m3_spec(4, 2, 64, 40, {.weights = kBlock}), make_spec(4, 2, 64, 40, DType::kBF16)}) {
    const auto source = make_synthetic_source(spec, 5);
    const Tensor hidden = random_tensor(DType::kBF16, 3, 64, 6);
    const ReferenceResult result =
        reference_forward(context, spec, *source, {.hidden = hidden.view(), .code_ambiguity = 0.1});
    EXPECT_EQ(result.allowance, std::vector<double>(3));
  }
}

// The row of pairs says this of weights in this form.
PlanRow verdict_on_pairs(const Context& context, const MoeSpec& spec) {
  const Plan plan = make_plan(context, spec, {.arithmetic = "dpbf16"});
  for (const PlanRow& row : plan.rows) {
    if (row.name == "cpu.avx512_bf16") return row;
  }
  return {};
}

TEST(PairedCodes, OrdersWideZerosAndOddGroups_AreRefusedWithAReason) {
  const auto isas = testing::usable_isas();
  if (std::find(isas.begin(), isas.end(), "avx512_bf16") == isas.end() || !cpu::permutes_bytes()) {
    GTEST_SKIP() << "this CPU lacks avx512_bf16 or avx512_vbmi";
  }
  const Context context({.num_threads = 1});
  const auto verdict = [&](const QuantSpec& quant) {
    return verdict_on_pairs(context, e4m3_spec(4, 2, 64, 32, quant));
  };
  EXPECT_TRUE(verdict({.weights = kBlock, .block_rows = 1, .zeros = WeightZero::kPoint}).chosen);
  EXPECT_TRUE(verdict({.weights = kChannel, .activations = kToken}).chosen);
  EXPECT_TRUE(
      verdict({.weights = kChannel, .activations = kToken, .has_column_factors = true}).chosen);
  for (const auto& [quant, why] :
       {std::pair{QuantSpec{.weights = kBlock, .block_rows = 1, .has_column_order = true}, "pairs"},
        {QuantSpec{.weights = kChannel, .zeros = WeightZero::kPoint}, "groups within one row"},
        {QuantSpec{.weights = kChannel, .has_column_factors = true}, "column factors"},
        {QuantSpec{
             .weights = kChannel, .activations = ActivationScale::kGroup, .activation_group = 31},
         "rows in pairs"}}) {
    const PlanRow row = verdict(quant);
    EXPECT_FALSE(row.chosen);
    EXPECT_NE(row.reason.find(why), std::string::npos) << row.reason;
  }
}

// Codes have the arithmetic of bf16 weights, unless another part of the layer has none of the kind.
TEST(PairedCodes, WithoutAName_AreChosenWhereBf16WeightsAre) {
  const Context context({.num_threads = 1});
  MoeSpec spec = e4m3_spec(4, 2, 64, 32, {.weights = kChannel});
  const std::string of_values =
      make_plan(context, make_spec(4, 2, 64, 32, DType::kBF16)).arithmetic;
  EXPECT_EQ(make_plan(context, spec).arithmetic, cpu::permutes_bytes() ? of_values : "f32_fma");
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 40, .weight_dtype = DType::kF16};
  EXPECT_EQ(make_plan(context, spec).arithmetic, "f32_fma");
  spec.shared.weight_dtype = DType::kBF16;
  EXPECT_EQ(make_plan(context, spec).arithmetic, cpu::permutes_bytes() ? of_values : "f32_fma");
}

// Every kernel row has the bits of the reference, including NaN codes.
TEST_P(CodedWeights, EveryIsa_HasTheSameBits) {
  size_t place = testing::first_place();
  for (const auto& [hidden_size, inner] :
       {std::pair<int64_t, int64_t>{200, 136}, {127, 33}, {1, 1}}) {
    if (!testing::in_sample(place++, 3)) continue;
    MoeSpec layer_spec = spec(5, 2, hidden_size, inner);
    layer_spec.has_bias = true;
    const Tensor hidden = random_tensor(DType::kF32, 37, hidden_size, 5);
    const auto run = [&](const std::string& isa) {
      const OwnedLayer owned = make_layer(layer_spec, {.arithmetic = "f32_fma"}, {.isa = isa});
      return run_layer(owned.layer, hidden.view(), DType::kF32).out;
    };
    const Tensor expected = run("scalar");
    for (const std::string& isa : testing::usable_isas()) {
      EXPECT_TRUE(same_bits(run(isa), expected)) << isa << " H" << hidden_size << " I" << inner;
    }
  }
}

}  // namespace
}  // namespace conclave
