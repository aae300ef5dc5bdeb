// What a method writes is what it reads: for every method that is written, codes, scales and zero
// points come back as they were, through the reader that layers use.
#include "checkpoint/tiny_model.h"
#include "support/case_name.h"

#include "conclave/checkpoint.h"
#include "conclave/format.h"
#include "conclave/methods.h"
#include "conclave/quantise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

constexpr int64_t kHidden = 256;
constexpr int64_t kInner = 128;
constexpr std::string_view kExperts = "model.layers.0.mlp.experts.";

struct Case {
  std::string name;
  MethodForm form;
  // How far scales may be from what they were, as a part of the largest: a method may round them.
  float scale_error = 0;
};
void PrintTo(const Case& written, std::ostream* out) { *out << written.name; }

QuantSpec in_groups(int64_t cols, WeightZero zeros = WeightZero::kNone) {
  return {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = cols, .zeros = zeros};
}

// A case for each form that tools offer, and for each that they make by options.
std::vector<Case> cases() {
  std::vector<Case> found;
  for (const WeightForm& form : weight_forms()) {
    const QuantiseOptions options{
        .codes = form.dtype, .quant = form.quant, .scale_dtype = form.scale_dtype};
    const bool made = !form.method.empty() && Quantiser::supports(options);
    if (made) found.push_back({.name = std::string(form.name), .form = method_form(form)});
  }
  for (const int64_t bits : {2, 3, 4, 8}) {
    for (const WeightZero zeros : {WeightZero::kNone, WeightZero::kPoint}) {
      for (const bool groups : {false, true}) {
        QuantSpec quant = in_groups(32, zeros);
        if (!groups) quant = {.weights = WeightScale::kChannel, .zeros = zeros};
        found.push_back({.name = "gptq " + std::to_string(bits) +
                                 (zeros == WeightZero::kNone ? " symmetric" : " asymmetric") +
                                 (groups ? " group32" : " channel"),
                         .form = {.method = "gptq",
                                  .codes = bits > 4 ? DType::kI8 : DType::kI4,
                                  .code_bits = bits,
                                  .quant = quant,
                                  .scale_dtype = DType::kF16}});
      }
    }
  }
  for (const int64_t bits : {2, 3, 4, 8}) {
    QuantSpec quant = in_groups(32, WeightZero::kPoint);
    quant.has_column_order = true;
    found.push_back({.name = "gptq " + std::to_string(bits) + " act order",
                     .form = {.method = "gptq",
                              .codes = bits > 4 ? DType::kI8 : DType::kI4,
                              .code_bits = bits,
                              .quant = quant,
                              .scale_dtype = DType::kF16}});
  }
  for (const int64_t group : {32, 64, 128}) {
    for (const char* layout : {"gemm", "gemv"}) {
      found.push_back({.name = std::string("awq ") + layout + std::to_string(group),
                       .form = {.method = "awq",
                                .format = layout,
                                .codes = DType::kI4,
                                .quant = in_groups(group, WeightZero::kPoint),
                                .scale_dtype = DType::kF16}});
    }
  }
  found.push_back({.name = "awq symmetric rows",
                   .form = {.method = "awq",
                            .codes = DType::kI4,
                            .quant = {.weights = WeightScale::kChannel},
                            .scale_dtype = DType::kF16}});
  for (const int64_t bits : {2, 3, 4, 5, 6, 8}) {
    QuantSpec quant = in_groups(64, WeightZero::kOffset);
    quant.signed_scales = true;
    found.push_back({.name = "mlx " + std::to_string(bits),
                     .form = {.method = "mlx",
                              .codes = bits > 4 ? DType::kI8 : DType::kI4,
                              .code_bits = bits,
                              .quant = quant,
                              .scale_dtype = bits == 4 ? DType::kF16 : DType::kBF16}});
  }
  // The method has the largest value of a row, of which the scale is a 127th.
  found.push_back({.name = "bitsandbytes int8",
                   .form = {.method = "bitsandbytes",
                            .codes = DType::kI8,
                            .quant = {.weights = WeightScale::kChannel}},
                   .scale_error = 0x1p-23F});
  for (const DType codes : {DType::kNF4, DType::kBnbFP4}) {
    const std::string type = codes == DType::kNF4 ? "nf4" : "fp4";
    const MethodForm plain{.method = "bitsandbytes", .codes = codes, .quant = in_groups(64)};
    MethodForm nested = plain;
    nested.format = "nested";
    found.push_back({.name = "bitsandbytes " + type, .form = plain});
    // Codes of scales lie at most 0.9 / 64 of the largest apart.
    found.push_back(
        {.name = "bitsandbytes nested " + type, .form = nested, .scale_error = 0.9F / 128});
  }
  found.push_back({.name = "int8 in words",
                   .form = {.method = "compressed-tensors",
                            .format = "pack-quantized",
                            .codes = DType::kI8,
                            .quant = in_groups(32)}});
  found.push_back({.name = "stacks of mxfp4",
                   .form = {.method = "mxfp4",
                            .codes = DType::kF4,
                            .quant = in_groups(32),
                            .scale_dtype = DType::kF8E8M0}});
  return found;
}

class WrittenMethod : public ::testing::TestWithParam<Case> {
 protected:
  const MethodForm& form() const { return GetParam().form; }
  bool is_stack() const { return form().method == "mxfp4"; }

  QuantisedRows made(const Quantiser& quantiser, int64_t rows, int64_t cols, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(rows * cols));
    float largest = 0;
    for (float& value : values) largest = std::max(largest, std::abs(value = normal(random)));
    scale_ = quantiser.needs_matrix_scale() ? writer_.as_read(quantiser.matrix_scale(largest)) : 1;
    return quantiser.quantise(values, rows, cols, scale_);
  }

  void put(CheckpointFeed& feed, const std::string& matrix, int64_t rows, int64_t cols,
           const QuantisedRows& codes) {
    for (WrittenTensor& tensor : writer_.tensors(matrix, rows, cols)) {
      std::vector<std::byte> bytes = codes.codes;
      if (!tensor.is_plane) {
        bytes = writer_.encode(tensor, rows, cols,
                               {.codes = codes.codes,
                                .scales = codes.scales,
                                .zeros = codes.zeros,
                                .order = order_of(cols),
                                .matrix_scale = scale_});
      } else if (tensor.plane != WeightPlane::kWeights) {
        bytes = codes.scales;
      }
      ASSERT_EQ(bytes.size(), tensor.bytes) << tensor.name;
      if (is_stack()) tensor.shape.insert(tensor.shape.begin(), 1);
      const bool taken = feed.put(
          tensor.name, {.data = bytes.data(), .dtype = tensor.dtype, .shape = Shape(tensor.shape)});
      // Sizes say what the configuration says, and are forgotten, as is what no layer needs.
      const bool forgotten =
          tensor.name.ends_with("_shape") || tensor.name.ends_with(".weight_format");
      EXPECT_EQ(taken, !forgotten) << tensor.name;
    }
  }

  // Neighbours lie in groups that take turns.
  std::vector<int32_t> order_of(int64_t cols) const {
    std::vector<int32_t> groups;
    if (!form().quant.has_column_order) return groups;
    const int64_t count = cols / form().quant.block_cols;
    for (int64_t col = 0; col < cols; ++col) groups.push_back(static_cast<int32_t>(col % count));
    return groups;
  }

  MethodWriter writer_ = MethodWriter(GetParam().form);
  float scale_ = 1;
};

std::vector<std::byte> plane_of(const WeightSource& source, WeightId id) {
  const WeightInfo info = source.describe(id);
  std::vector<std::byte> bytes(
      static_cast<size_t>(info.rows * ((info.cols * bit_size(info.dtype) + 7) / 8)));
  source.read(id, 0, {0, info.rows, 0, info.cols}, bytes);
  return bytes;
}

// Numbers, of which 0 has two patterns.
std::vector<float> floats_of(const std::vector<std::byte>& bytes) {
  std::vector<float> numbers(bytes.size() / sizeof(float));
  std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}

void expect_near(const std::vector<std::byte>& read, const std::vector<std::byte>& made,
                 float part) {
  const std::vector<float> found = floats_of(read);
  const std::vector<float> expected = floats_of(made);
  ASSERT_EQ(found.size(), expected.size());
  const float largest = *std::ranges::max_element(expected);
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_LE(std::abs(found[i] - expected[i]), part * largest) << i;
  }
}

TEST_P(WrittenMethod, Planes_ComeBackAsTheyWere) {
  QuantSpec unordered = form().quant;
  unordered.has_column_order = false;
  const Quantiser quantiser({.codes = form().codes,
                             .code_bits = form().code_bits,
                             .quant = unordered,
                             .scale_dtype = form().scale_dtype});
  MoeSpec spec;
  spec.num_experts = spec.top_k = 1;
  spec.hidden_size = kHidden;
  spec.intermediate_size = kInner;
  spec.has_gate = false;
  const std::array<int64_t, 1> layers = {0};
  CheckpointFeed feed =
      CheckpointFeed::from_spec(spec, is_stack() ? "gpt_oss" : "qwen3_moe", layers,
                                writer_.configuration({"model.layers.0.mlp.gate"}));
  const std::string prefix = std::string(kExperts) + (is_stack() ? "" : "0.");
  const std::string ending = is_stack() ? "" : ".weight";
  if (is_stack()) {
    put(feed, prefix + "gate_up_proj", 2 * kInner, kHidden,
        made(quantiser, 2 * kInner, kHidden, 1));
  } else {
    put(feed, prefix + "gate_proj" + ending, kInner, kHidden, made(quantiser, kInner, kHidden, 1));
    put(feed, prefix + "up_proj" + ending, kInner, kHidden, made(quantiser, kInner, kHidden, 2));
  }
  const QuantisedRows down = made(quantiser, kHidden, kInner, 3);
  put(feed, prefix + "down_proj" + ending, kHidden, kInner, down);
  ASSERT_EQ(feed.missing(), std::vector<std::string>());

  const CheckpointLayer layer = feed.layer(0);
  EXPECT_EQ(layer.spec.weight_dtype, form().codes);
  EXPECT_EQ(layer.spec.quant.zeros, form().quant.zeros);
  const auto source = feed.layer_source(0);
  EXPECT_EQ(plane_of(*source, weights::kDown), down.codes);
  const WeightId scales = weights::kDown.with(WeightPlane::kScale);
  EXPECT_EQ(source->describe(scales).dtype, form().scale_dtype);
  if (GetParam().scale_error > 0) {
    expect_near(plane_of(*source, scales), down.scales, GetParam().scale_error);
  } else {
    EXPECT_EQ(plane_of(*source, scales), down.scales);
  }
  if (form().quant.has_column_order) {
    const auto order = plane_of(*source, weights::kDown.with(WeightPlane::kColumnOrder));
    std::vector<int32_t> groups(kInner);
    ASSERT_EQ(order.size(), groups.size() * sizeof(int32_t));
    std::memcpy(groups.data(), order.data(), order.size());
    EXPECT_EQ(groups, order_of(kInner));
  }
  if (form().quant.zeros != WeightZero::kNone) {
    EXPECT_EQ(floats_of(plane_of(*source, weights::kDown.with(WeightPlane::kZero))),
              floats_of(down.zeros));
  }
  if (form().quant.has_global_scale) {
    const auto global = plane_of(*source, weights::kDown.with(WeightPlane::kGlobalScale));
    EXPECT_EQ(floats_of(global), std::vector<float>{scale_});
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, WrittenMethod, ::testing::ValuesIn(cases()),
                         [](const auto& test) { return case_name(test.param.name); });

TEST(MethodWriter, EveryWrittenMethod_IsReadAndComesBackAbove) {
  const std::vector<std::string> known = checkpoint_methods();
  for (const std::string& method : MethodWriter::methods()) {
    EXPECT_EQ(std::ranges::count(known, method), 1) << method;
    EXPECT_TRUE(std::ranges::any_of(
        cases(), [&](const Case& written) { return written.form.method == method; }))
        << method << " has no case";
  }
}

TEST(MethodWriter, FormsThatAMethodDoesNotHave_AreRefused) {
  const MethodForm gptq{
      .method = "gptq", .codes = DType::kI4, .code_bits = 4, .quant = in_groups(32)};
  EXPECT_NO_THROW(MethodWriter{gptq});
  MethodForm form = gptq;
  form.method = "quark";
  EXPECT_EQ(error_of([&] { MethodWriter{form}; })->code(), ErrorCode::kUnsupported);
  form = gptq;
  form.code_bits = 5;
  EXPECT_EQ(error_of([&] { MethodWriter{form}; })->code(), ErrorCode::kUnsupported);
  form = gptq;
  form.codes = DType::kF4;
  EXPECT_EQ(error_of([&] { MethodWriter{form}; })->code(), ErrorCode::kUnsupported);
  form = gptq;
  form.quant.has_column_factors = true;
  EXPECT_EQ(error_of([&] { MethodWriter{form}; })->code(), ErrorCode::kUnsupported);
  // Columns of whole rows have no groups to be in.
  form.quant = {.weights = WeightScale::kChannel, .has_column_order = true};
  EXPECT_EQ(error_of([&] { MethodWriter{form}; })->code(), ErrorCode::kUnsupported);
  const MethodForm nf4{.method = "bitsandbytes", .codes = DType::kNF4, .quant = in_groups(64)};
  form = nf4;
  form.quant = in_groups(128);
  EXPECT_EQ(error_of([&] { MethodWriter{form}; })->code(), ErrorCode::kUnsupported);
  // Blocks would go over the ends of rows.
  const auto error = error_of([&] { MethodWriter(nf4).tensors("w1.weight", 64, 96); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kUnsupported);
}

TEST(MethodWriter, CodesThatFillNoWord_AreRefusedByName) {
  const MethodWriter words({.method = "gptq",
                            .codes = DType::kI4,
                            .code_bits = 3,
                            .quant = {.weights = WeightScale::kChannel}});
  EXPECT_EQ(words.whole_cols(), 32);
  EXPECT_EQ(words.whole_rows(), 32);
  const auto error = error_of([&] { words.tensors("w1.weight", 32, 40); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kUnsupported);
  EXPECT_NE(std::string(error->what()).find("w1.weight"), std::string::npos) << error->what();
  const MethodWriter plain(
      {.method = "fp8",
       .codes = DType::kF8E4M3,
       .quant = {.weights = WeightScale::kTensor, .activations = ActivationScale::kToken}});
  EXPECT_EQ(plain.whole_cols(), 1);
  EXPECT_EQ(plain.tensors("w1.weight", 3, 5).front().bytes, 15U);
}

}  // namespace
}  // namespace conclave::testing
