// Routers that are packed as experts are: a quantiser that is not told to leave any module out
// packs them too. A router here is the first rows of an expert's gate matrix, as the method's own
// package stored it.
#include "checkpoint/golden_folder.h"
#include "checkpoint/tiny_model.h"
#include "core/weight_types.h"
#include "quant/planes.h"
#include "quant/weight_format.h"

#include "conclave/checkpoint.h"
#include "conclave/context.h"
#include "conclave/layer.h"
#include "conclave/synthetic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Folders whose experts have tensors of their own, all of them in one form. MLX and bitsandbytes
// have files with packed routers.
std::vector<std::string> folder_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("testdata/quantised")) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::erase_if(names, [](const std::string& name) {
    return has(name, "bnb") || has(name, "mlx") || has(name, "mixed") || has(name, "stacked") ||
           has(name, "gpt_oss") || has(name, "deepseek_v4");
  });
  std::sort(names.begin(), names.end());
  return names;
}

// The begin of a tensor's first axis, or of the second one of transposed matrices.
std::vector<std::byte> first_part(const TinyTensor& tensor, size_t axis, int64_t count) {
  const int64_t lines = axis == 0 ? 1 : tensor.shape[0];
  const size_t line = tensor.bytes.size() / static_cast<size_t>(lines);
  const size_t kept = line / static_cast<size_t>(tensor.shape[axis]) * static_cast<size_t>(count);
  std::vector<std::byte> bytes;
  for (size_t at = 0; at < tensor.bytes.size(); at += line) {
    const auto first = tensor.bytes.begin() + static_cast<std::ptrdiff_t>(at);
    bytes.insert(bytes.end(), first, first + static_cast<std::ptrdiff_t>(kept));
  }
  return bytes;
}

struct PackedModel {
  TinyModel model;
  std::string router;  // "model.layers.0.mlp.gate"

  const TinyTensor& tensor(const std::string& suffix) { return model.at(router + suffix); }
  std::vector<std::string> router_names() const {
    std::vector<std::string> names;
    for (const TinyTensor& tensor : model.tensors) {
      const bool own = tensor.name.starts_with(router + ".");
      if (own && !has(tensor.name, "correction")) names.push_back(tensor.name);
    }
    return names;
  }
};

bool is_transposed(const std::string& folder) {
  const bool by_rows = has(folder, "gemv") || has(folder, "modelopt");
  return has(folder, "gptq") || (has(folder, "awq") && !by_rows) || has(folder, "quark-int4") ||
         has(folder, "quark-uint4");
}

// Replaces the values of a module by the first rows of an expert's gate matrix.
void pack_rows(const std::string& folder, const std::string& expert, const std::string& module,
               TinyModel& model) {
  const int64_t wanted = model.at(module + ".weight").shape[0];
  model.drop(module + ".weight");
  const bool transposed = is_transposed(folder);
  const size_t axis = transposed ? 1 : 0;
  int64_t rows = 0;
  for (const TinyTensor& tensor : model.tensors) {
    if (!tensor.name.starts_with(expert + ".")) continue;
    const bool is_scale = tensor.name.ends_with("scales") || tensor.name.ends_with("weight_scale");
    if (is_scale && tensor.shape.size() > axis) rows = std::max(rows, tensor.shape[axis]);
    if (tensor.name.ends_with(".weight")) rows = std::max(rows, tensor.shape[axis]);
  }
  std::vector<TinyTensor> cut;
  for (TinyTensor tensor : model.tensors) {
    if (!tensor.name.starts_with(expert + ".")) continue;
    tensor.name.replace(0, expert.size(), module);
    const bool whole = has(tensor.name, "g_idx") || has(tensor.name, "pre_quant") ||
                       has(tensor.name, "weight_shape") || has(tensor.name, "global");
    if (!whole && tensor.shape.size() > axis) {
      const int64_t kept = (wanted * tensor.shape[axis] + rows - 1) / rows;
      tensor.bytes = first_part(tensor, axis, kept);
      tensor.shape[axis] = kept;
    }
    cut.push_back(std::move(tensor));
  }
  model.tensors.insert(model.tensors.end(), cut.begin(), cut.end());
}

PackedModel pack_router(const std::string& folder) {
  PackedModel packed{.model = golden_folder(folder), .router = {}};
  TinyModel& model = packed.model;
  // ModelOpt's file beside config.json may stand in there, too.
  std::ifstream beside("testdata/quantised/" + folder + "/hf_quant_config.json");
  if (beside.is_open()) {
    model.config["quantization_config"] = nlohmann::json::parse(beside);
    model.config["quantization_config"]["quant_method"] = "modelopt";
  }
  std::string expert;
  for (const TinyTensor& tensor : model.tensors) {
    for (const char* matrix : {"experts.1.gate_proj", "experts.1.w1"}) {
      const size_t at = tensor.name.find(matrix);
      if (at == std::string::npos) continue;
      expert = tensor.name.substr(0, at) + matrix;
      packed.router = tensor.name.substr(0, at) + "gate";
    }
  }
  pack_rows(folder, expert, packed.router, model);
  return packed;
}

std::vector<double> numbers_of(const WeightSource& source, WeightId id, int64_t expert) {
  const WeightInfo info = source.describe(id);
  // Rows of half bytes have an even number of columns here.
  std::vector<std::byte> bytes(
      static_cast<size_t>(packed_bytes(info.dtype, info.rows * info.cols)));
  source.read(id, expert, {0, info.rows, 0, info.cols}, bytes);
  std::vector<double> numbers(static_cast<size_t>(info.rows * info.cols));
  for (int64_t i = 0; i < std::ssize(numbers); ++i) {
    float value = 0;
    if (info.dtype == DType::kI32) {
      int32_t number = 0;
      std::memcpy(&number, bytes.data() + i * 4, sizeof(number));
      numbers[static_cast<size_t>(i)] = number;
      continue;
    }
    if (info.dtype == DType::kF8E8M0) {
      numbers[static_cast<size_t>(i)] =
          std::ldexp(1.0, std::to_integer<int>(bytes[static_cast<size_t>(i)]) - 127);
      continue;
    }
    quant::format_of(info.dtype).decode(bytes.data(), i, 1, &value);
    numbers[static_cast<size_t>(i)] = value;
  }
  return numbers;
}

// The first rows of an expert's gate matrix by its codes and planes, in float64.
std::vector<double> decoded_gate(const WeightSource& source, const QuantSpec& quant,
                                 int64_t experts) {
  const WeightInfo info = source.describe(weights::kGate);
  const auto plane = [&](WeightPlane of) {
    return source.describe(weights::kGate.with(of)).count == 0
               ? std::vector<double>()
               : numbers_of(source, weights::kGate.with(of), 1);
  };
  const std::vector<double> codes = numbers_of(source, weights::kGate, 1);
  const std::vector<double> scales = plane(WeightPlane::kScale);
  const std::vector<double> zeros = plane(WeightPlane::kZero);
  const std::vector<double> global = plane(WeightPlane::kGlobalScale);
  const std::vector<double> order = plane(WeightPlane::kColumnOrder);
  const std::vector<double> factors = plane(WeightPlane::kColumnFactor);
  const quant::PlaneShape shape =
      quant::plane_of(WeightPlane::kScale, info.dtype, quant, info.rows, info.cols);
  std::vector<double> values;
  for (int64_t row = 0; row < experts; ++row) {
    for (int64_t col = 0; col < info.cols; ++col) {
      const auto at = static_cast<size_t>(col);
      const int64_t group =
          order.empty() ? col / shape.block_cols : static_cast<int64_t>(order[at]);
      const auto scale = static_cast<size_t>(row / shape.block_rows * shape.cols + group);
      const double code = codes[static_cast<size_t>(row * info.cols + col)];
      const double zero = zeros.empty() ? 0 : zeros[scale];
      double value = (code - zero) * scales[scale];
      if (!global.empty()) value *= global[0];
      if (!factors.empty()) value *= factors[at];
      values.push_back(value);
    }
  }
  return values;
}

std::vector<float> router_of(const WeightSource& source) {
  const std::vector<std::byte> bytes = read_matrix(source, weights::kRouter, 0);
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

Tensor forward(const Context& context, const MoeSpec& spec, const WeightSource& source) {
  const MoeLayer layer = MoeLayer::create(context, spec, source);
  constexpr int64_t kTokens = 7;
  Tensor hidden(DType::kF32, {kTokens, spec.hidden_size});
  Tensor out(DType::kF32, {kTokens, spec.hidden_size});
  fill_random(hidden.view(), 5);
  layer.forward({.hidden = hidden.view(), .out = out.view()});
  return out;
}

class PackedRouter : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Folders, PackedRouter, ::testing::ValuesIn(folder_names()),
                         [](const auto& folder) {
                           std::string name = folder.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(PackedRouter, Values_AreThoseOfItsCodesAndPlanes) {
  const PackedModel packed = pack_router(GetParam());
  const TempDir directory;
  write_single(packed.model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  const CheckpointLayer& layer = checkpoint.layers().front();
  ASSERT_TRUE(layer.support) << layer.support.reason();
  const auto source = checkpoint.layer_source(layer.index);
  ASSERT_EQ(source->describe(weights::kRouter).dtype, DType::kF32);
  const std::vector<double> expected =
      decoded_gate(*source, layer.spec.quant, layer.spec.num_experts);
  const std::vector<float> found = router_of(*source);
  ASSERT_EQ(found.size(), expected.size());
  // Scales times global scales, and zero points times scales, are rounded before a weight is.
  const double largest = std::abs(
      *std::ranges::max_element(expected, {}, [](double value) { return std::abs(value); }));
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_NEAR(found[i], expected[i], 0x1p-23 * largest) << i;
  }
  EXPECT_TRUE(std::ranges::any_of(found, [](float value) { return value != 0; }));
}

TEST_P(PackedRouter, Layer_RunsAsWithItsValues) {
  PackedModel packed = pack_router(GetParam());
  const TempDir directory;
  const TempDir plain_directory;
  write_single(packed.model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  const CheckpointLayer& layer = checkpoint.layers().front();
  const auto source = checkpoint.layer_source(layer.index);
  const std::vector<float> router = router_of(*source);
  for (const std::string& name : packed.router_names()) packed.model.drop(name);
  TinyTensor& plain = packed.model.add(packed.router + ".weight", DType::kF32,
                                       {layer.spec.num_experts, layer.spec.hidden_size});
  plain.bytes.resize(router.size() * sizeof(float));
  std::memcpy(plain.bytes.data(), router.data(), plain.bytes.size());
  write_single(packed.model, plain_directory.path());
  const Checkpoint other = Checkpoint::open(plain_directory.path());
  const Context context({.num_threads = 1});
  const Tensor found = forward(context, layer.spec, *source);
  const Tensor expected =
      forward(context, other.layers().front().spec, *other.layer_source(layer.index));
  EXPECT_EQ(std::memcmp(found.as<std::byte>(), expected.as<std::byte>(), found.size_bytes()), 0);
}

TEST_P(PackedRouter, Feed_GivesTheSameValuesInAnyOrder) {
  PackedModel packed = pack_router(GetParam());
  if (!packed.model.config.contains("quantization_config")) {
    GTEST_SKIP() << "config.json names no method";
  }
  const TempDir directory;
  write_single(packed.model, directory.path());
  const std::vector<float> expected =
      router_of(*Checkpoint::open(directory.path()).layer_source(0));
  for (int turn = 0; turn < 2; ++turn) {
    CheckpointFeed feed = CheckpointFeed::from_config(packed.model.config.dump());
    for (const TinyTensor& tensor : packed.model.tensors) {
      static_cast<void>(feed.put(tensor.name, {.data = tensor.bytes.data(),
                                               .dtype = tensor.dtype,
                                               .shape = Shape(std::span(tensor.shape))}));
    }
    ASSERT_TRUE(feed.is_complete(0)) << feed.missing().front();
    EXPECT_EQ(router_of(*feed.layer_source(0)), expected);
    std::reverse(packed.model.tensors.begin(), packed.model.tensors.end());
  }
}

// Each of its tensors is needed, or of no use at all.
TEST_P(PackedRouter, TensorsThatAreMissing_AreNamed) {
  const std::vector<std::string> names = pack_router(GetParam()).router_names();
  for (const std::string& name : names) {
    const bool spare = has(name, "input") || has(name, "weight_shape") || has(name, "pre_quant") ||
                       has(name, "weight_scale_2");
    // Codes that need no order or zero points may have them all the same.
    if (spare || has(name, "g_idx") || has(name, "zero")) continue;
    PackedModel packed = pack_router(GetParam());
    packed.model.drop(name);
    const TempDir directory;
    write_single(packed.model, directory.path());
    const auto error = open_error(directory.path());
    ASSERT_TRUE(error) << name;
    EXPECT_EQ(error->code(), ErrorCode::kTensorMissing) << error->what();
    EXPECT_TRUE(has(error->what(), packed.router)) << error->what();
  }
}

TEST_P(PackedRouter, ShapesThatDoNotFit_AreNamed) {
  for (const std::string& name : pack_router(GetParam()).router_names()) {
    if (has(name, "input") || has(name, "weight_shape")) continue;
    PackedModel packed = pack_router(GetParam());
    TinyTensor& tensor = packed.model.at(name);
    const size_t bytes = tensor.bytes.size();
    if (tensor.shape.empty()) tensor.shape = {1};
    tensor.shape.front() *= 3;
    tensor.bytes.resize(bytes * 3);
    const TempDir directory;
    write_single(packed.model, directory.path());
    // Tensors that only serve to check others are read with the matrix.
    auto error = open_error(directory.path());
    if (!error) {
      error = error_of([&] {
        static_cast<void>(router_of(*Checkpoint::open(directory.path()).layer_source(0)));
      });
    }
    if (!error && has(name, "weight_scale_2")) continue;  // not read where it cancels out
    ASSERT_TRUE(error) << name;
    EXPECT_EQ(error->code(), ErrorCode::kTensorShape) << error->what();
    EXPECT_EQ(error->detail().tensor, name) << error->what();
    EXPECT_FALSE(error->detail().expected.empty());
    EXPECT_FALSE(error->detail().found.empty());
  }
}

// A gate before shared experts is packed likewise.
TEST(PackedRouterValues, SharedExpertGate_HasItsValues) {
  for (const char* folder :
       {"qwen2_moe-compressed-int4-shared-bf16", "qwen2_moe-fp8-block-shared-bf16"}) {
    SCOPED_TRACE(folder);
    TinyModel model = golden_folder(folder);
    pack_rows(folder, "model.layers.0.mlp.experts.1.gate_proj",
              "model.layers.0.mlp.shared_expert_gate", model);
    const TempDir directory;
    write_single(model, directory.path());
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    const CheckpointLayer& layer = checkpoint.layers().front();
    ASSERT_TRUE(layer.support) << layer.support.reason();
    const auto source = checkpoint.layer_source(layer.index);
    const std::vector<double> expected = decoded_gate(*source, layer.spec.quant, 1);
    const std::vector<double> found = numbers_of(*source, weights::kSharedExpertGate, 0);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_NEAR(found[i], expected[i], 0x1p-23 * std::abs(expected[i])) << i;
    }
  }
}

TEST(PackedRouterValues, ScaleThatIsNotFinite_IsNamed) {
  PackedModel packed = pack_router("deepseek_v3-fp8-block");
  const std::string name = packed.router + ".weight_scale_inv";
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(packed.model.at(name).bytes.data(), &nan, sizeof(nan));
  const TempDir directory;
  write_single(packed.model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  const int64_t layer = checkpoint.layers().front().index;
  const auto error =
      error_of([&] { static_cast<void>(router_of(*checkpoint.layer_source(layer))); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorValue) << error->what();
  EXPECT_TRUE(has(error->detail().tensor, name)) << error->what();
  EXPECT_EQ(error->detail().expected, "finite and not negative");
}

TEST(PackedRouterValues, ScaleOfPlainValues_IsUnexpected) {
  for (const char* folder : {"qwen3_moe-gptq-int4-group32", "qwen3_moe-compressed-block"}) {
    const PackedModel packed = pack_router(folder);
    TinyModel plain = golden_folder(folder);
    for (const std::string& name : packed.router_names()) {
      if (!has(name, "scale")) continue;
      PackedModel copy = packed;
      const TinyTensor scale = copy.model.at(name);
      plain.add(name, scale.dtype, scale.shape).bytes = scale.bytes;
      const TempDir directory;
      write_single(plain, directory.path());
      const auto error = open_error(directory.path());
      ASSERT_TRUE(error) << name;
      EXPECT_EQ(error->code(), ErrorCode::kTensorUnexpected) << error->what();
      EXPECT_EQ(error->detail().tensor, name) << error->what();
    }
  }
}

TEST(PackedRouterValues, TwoNamesOfAScale_AreAFault) {
  PackedModel packed = pack_router("deepseek_v3-fp8-block");
  const TinyTensor scale = packed.tensor(".weight_scale_inv");
  packed.model.add(packed.router + ".weight_scale", scale.dtype, scale.shape).bytes = scale.bytes;
  const TempDir directory;
  write_single(packed.model, directory.path());
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorDuplicate) << error->what();
}

}  // namespace
}  // namespace conclave::testing
