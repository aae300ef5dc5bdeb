// Latent projections and residual MLPs in codes: a quantiser that is not told to leave them out
// packs them as it packs experts, and a layer has them as values.
#include "checkpoint/golden_folder.h"
#include "checkpoint/tiny_model.h"
#include "core/float8.h"
#include "core/float_convert.h"

#include "conclave/checkpoint.h"
#include "conclave/context.h"
#include "conclave/layer.h"
#include "conclave/synthetic.h"
#include "conclave/tensor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

using nlohmann::json;

// A matrix in a method's tensors, and the values that these stand for.
struct Packed {
  std::vector<TinyTensor> tensors;
  std::vector<float> values;
};

struct Matrix {
  std::string module;
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<float> values;

  float at(int64_t row, int64_t col) const { return values[static_cast<size_t>(row * cols + col)]; }
  float largest(int64_t row, int64_t begin, int64_t end) const {
    float largest = 0;
    for (int64_t col = begin; col < end; ++col) largest = std::max(largest, std::abs(at(row, col)));
    return largest > 0 ? largest : 1;
  }
};

TinyTensor tensor_of(std::string name, DType dtype, std::vector<int64_t> shape, size_t bytes) {
  return {.name = std::move(name),
          .dtype = dtype,
          .shape = std::move(shape),
          .bytes = std::vector<std::byte>(bytes)};
}

void put(TinyTensor& tensor, int64_t index, float value) {
  std::memcpy(tensor.bytes.data() + index * 4, &value, sizeof(value));
}

// A code of a byte and a scale for each row, where encode(quotient) gives a code with its value.
template <class Encode>
Packed by_row(const Matrix& matrix, DType codes, float largest_code, const Encode& encode) {
  const auto count = static_cast<size_t>(matrix.rows * matrix.cols);
  Packed packed;
  packed.tensors.push_back(
      tensor_of(matrix.module + ".weight", codes, {matrix.rows, matrix.cols}, count));
  packed.tensors.push_back(tensor_of(matrix.module + ".weight_scale", DType::kF32, {matrix.rows, 1},
                                     static_cast<size_t>(matrix.rows) * 4));
  for (int64_t row = 0; row < matrix.rows; ++row) {
    const float scale = matrix.largest(row, 0, matrix.cols) / largest_code;
    put(packed.tensors[1], row, scale);
    for (int64_t col = 0; col < matrix.cols; ++col) {
      const auto [code, value] = encode(matrix.at(row, col) / scale);
      packed.tensors[0].bytes[static_cast<size_t>(row * matrix.cols + col)] = std::byte{code};
      packed.values.push_back(value * scale);
    }
  }
  return packed;
}

Packed pack_int8(const Matrix& matrix) {
  return by_row(matrix, DType::kI8, 127, [](float quotient) {
    const auto code = static_cast<int8_t>(std::lrint(quotient));
    return std::pair(static_cast<uint8_t>(code), static_cast<float>(code));
  });
}
Packed pack_e4m3(const Matrix& matrix) {
  return by_row(matrix, DType::kF8E4M3, 448, [](float quotient) {
    const uint8_t code = float_to_e4m3(quotient);
    return std::pair(code, e4m3_to_float(code));
  });
}

// Words of eight rows, transposed, in the order that Quark calls "order".
constexpr int64_t kGroup = 8;
Packed pack_words(const Matrix& matrix) {
  const int64_t words = (matrix.rows + 7) / 8;
  const int64_t groups = (matrix.cols + kGroup - 1) / kGroup;
  Packed packed;
  packed.tensors.push_back(tensor_of(matrix.module + ".weight", DType::kI32, {matrix.cols, words},
                                     static_cast<size_t>(matrix.cols * words) * 4));
  packed.tensors.push_back(tensor_of(matrix.module + ".weight_scale", DType::kF32,
                                     {groups, matrix.rows},
                                     static_cast<size_t>(groups * matrix.rows) * 4));
  for (int64_t row = 0; row < matrix.rows; ++row) {
    for (int64_t col = 0; col < matrix.cols; ++col) {
      const int64_t begin = col / kGroup * kGroup;
      const float scale = matrix.largest(row, begin, std::min(matrix.cols, begin + kGroup)) / 7;
      put(packed.tensors[1], col / kGroup * matrix.rows + row, scale);
      const auto code = static_cast<int>(std::lrint(matrix.at(row, col) / scale));
      const int64_t place = (col * words + row / 8) * 4 + row % 8 / 2;
      packed.tensors[0].bytes[static_cast<size_t>(place)] |=
          static_cast<std::byte>((code & 0xf) << (row % 2 * 4));
      packed.values.push_back(static_cast<float>(code) * scale);
    }
  }
  return packed;
}

json scheme_of(const char* type, const char* format) {
  const json weights = {
      {"num_bits", 8}, {"type", type}, {"symmetric", true}, {"strategy", "channel"}};
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"config_groups",
           {{"group_0", {{"weights", weights}, {"targets", json::array({"Linear"})}}}}}};
}
json words_of_quark() {
  const json weight = {{"dtype", "int4"}, {"qscheme", "per_group"}, {"group_size", kGroup}};
  return {{"quant_method", "quark"},
          {"export", {{"pack_method", "order"}}},
          {"global_quant_config", {{"weight", weight}}}};
}

// Matrices of rows in int8, those called w2 and up in e4m3: a module's own scheme counts.
bool is_second(const std::string& module) {
  return module.ends_with("w2") || module.ends_with("up_proj");
}
json scheme_of_each() {
  json config = scheme_of("int", "mixed-precision");
  json second = scheme_of("float", "float-quantized")["config_groups"]["group_0"];
  config["config_groups"]["group_0"]["format"] = "int-quantized";
  second["format"] = "float-quantized";
  second["targets"] = {"re:.*w2$", "re:.*up_proj$"};
  config["config_groups"]["group_0"]["targets"] = {"re:.*w[13]$", "re:.*gate_proj$",
                                                   "re:.*down_proj$", "re:.*fc[12]_latent_proj$"};
  config["config_groups"]["group_1"] = second;
  return config;
}
Packed pack_each(const Matrix& matrix) {
  return is_second(matrix.module) ? pack_e4m3(matrix) : pack_int8(matrix);
}

struct Form {
  const char* name;
  json (*config)();
  Packed (*pack)(const Matrix& matrix);
};
const Form kForms[] = {
    {"int8", [] { return scheme_of("int", "int-quantized"); }, pack_int8},
    {"e4m3", [] { return scheme_of("float", "float-quantized"); }, pack_e4m3},
    {"words", words_of_quark, pack_words},
    {"each", scheme_of_each, pack_each},
};

// A golden model with such parts.
struct Family {
  const char* folder;
  std::vector<std::pair<std::string, WeightId>> parts;  // ends of names, and what they are
};
const Family kFamilies[] = {
    {"arctic",
     {{".residual_mlp.w1", weights::kResidualGate},
      {".residual_mlp.w3", weights::kResidualUp},
      {".residual_mlp.w2", weights::kResidualDown}}},
    {"nemotron_h-latent",
     {{".fc1_latent_proj", weights::kLatentDown}, {".fc2_latent_proj", weights::kLatentUp}}},
    {"kimi_k3",
     {{".routed_expert_down_proj", weights::kLatentDown},
      {".routed_expert_up_proj", weights::kLatentUp}}},
};

constexpr const char* kEnding = ".weight";

Matrix matrix_of(const TinyTensor& tensor) {
  Matrix matrix{.module = tensor.name.substr(0, tensor.name.size() - std::strlen(kEnding)),
                .rows = tensor.shape[0],
                .cols = tensor.shape[1],
                .values = {}};
  for (size_t i = 0; i < tensor.bytes.size(); i += 2) {
    uint16_t bits = 0;
    std::memcpy(&bits, tensor.bytes.data() + i, sizeof(bits));
    matrix.values.push_back(bf16_to_float(bits));
  }
  return matrix;
}

bool is_part(const Family& family, const std::string& name) {
  return std::ranges::any_of(
      family.parts, [&](const auto& part) { return name.ends_with(part.first + kEnding); });
}

// The golden model with its experts and parts in codes; `values`: with parts as float32 numbers.
struct PackedModel {
  TinyModel model;
  TinyModel values;
  std::vector<TinyTensor> parts;  // as in `values`
};
PackedModel pack(const Family& family, const Form& form) {
  PackedModel packed{.model = read_folder(std::filesystem::path("testdata/models") / family.folder),
                     .values = {},
                     .parts = {}};
  TinyModel& model = packed.model;
  json& config = model.config.contains("text_config") ? model.config["text_config"] : model.config;
  config.erase("quantization_config");
  model.config["quantization_config"] = form.config();
  packed.values = model;
  for (const TinyTensor& tensor : std::vector<TinyTensor>(model.tensors)) {
    const bool part = is_part(family, tensor.name);
    const bool expert = tensor.name.find("experts.") != std::string::npos;
    if (!(part || expert) || !tensor.name.ends_with(kEnding) || tensor.shape.size() != 2) continue;
    Packed made = form.pack(matrix_of(tensor));
    model.drop(tensor.name);
    packed.values.drop(tensor.name);
    for (const TinyTensor& own : made.tensors) {
      model.tensors.push_back(own);
      if (!part) packed.values.tensors.push_back(own);
    }
    if (!part) continue;
    TinyTensor plain =
        tensor_of(tensor.name, DType::kF32, tensor.shape, made.values.size() * sizeof(float));
    std::memcpy(plain.bytes.data(), made.values.data(), plain.bytes.size());
    packed.parts.push_back(plain);
    packed.values.tensors.push_back(std::move(plain));
  }
  return packed;
}

Tensor forward(const MoeSpec& spec, const WeightSource& source) {
  const Context context({.num_threads = 1});
  const MoeLayer layer = MoeLayer::create(context, spec, source);
  constexpr int64_t kTokens = 7;
  Tensor hidden(DType::kF32, {kTokens, spec.hidden_size});
  Tensor out(DType::kF32, {kTokens, spec.hidden_size});
  fill_random(hidden.view(), 5);
  ForwardArgs args{.hidden = hidden.view(), .out = out.view()};
  Tensor residual(DType::kF32, {kTokens, spec.hidden_size});
  fill_random(residual.view(), 6);
  if (spec.residual.intermediate_size > 0) args.residual_input = residual.view();
  layer.forward(args);
  return out;
}

using Case = std::pair<size_t, size_t>;
std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (size_t family = 0; family < std::size(kFamilies); ++family) {
    for (size_t form = 0; form < std::size(kForms); ++form) cases.emplace_back(family, form);
  }
  return cases;
}

class PackedParts : public ::testing::TestWithParam<Case> {
 protected:
  const Family& family() const { return kFamilies[GetParam().first]; }
  const Form& form() const { return kForms[GetParam().second]; }
};
INSTANTIATE_TEST_SUITE_P(Families, PackedParts, ::testing::ValuesIn(all_cases()),
                         [](const auto& instance) {
                           std::string name = kFamilies[instance.param.first].folder;
                           name += std::string("_") + kForms[instance.param.second].name;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

void expect_values(const Family& family, const PackedModel& packed, const WeightSource& source,
                   int64_t layer) {
  const std::string number = "layers." + std::to_string(layer) + ".";
  size_t compared = 0;
  for (const TinyTensor& part : packed.parts) {
    if (part.name.find(number) == std::string::npos) continue;
    for (const auto& [ending, id] : family.parts) {
      if (!part.name.ends_with(ending + kEnding)) continue;
      EXPECT_EQ(source.describe(id).dtype, DType::kF32) << part.name;
      EXPECT_EQ(read_matrix(source, id, 0), part.bytes) << part.name;
      ++compared;
    }
  }
  EXPECT_EQ(compared, family.parts.size());
}

TEST_P(PackedParts, Values_AreCodesTimesScales) {
  const PackedModel packed = pack(family(), form());
  const TempDir directory;
  write_single(packed.model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  ASSERT_FALSE(checkpoint.layers().empty());
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    ASSERT_TRUE(layer.support) << layer.support.reason();
    // Experts in int8 and e4m3 have float32 values in common.
    const bool are_values = form().pack == pack_each;
    EXPECT_EQ(layer.spec.quant.weights == WeightScale::kNone, are_values);
    expect_values(family(), packed, *checkpoint.layer_source(layer.index), layer.index);
  }
}

TEST_P(PackedParts, Feed_HasTheSameValuesInAnyOrder) {
  PackedModel packed = pack(family(), form());
  std::mt19937 random(4);
  for (int turn = 0; turn < 2; ++turn) {
    CheckpointFeed feed = CheckpointFeed::from_config(packed.model.config.dump());
    for (const TinyTensor& tensor : packed.model.tensors) {
      static_cast<void>(feed.put(tensor.name, {.data = tensor.bytes.data(),
                                               .dtype = tensor.dtype,
                                               .shape = Shape(std::span(tensor.shape))}));
    }
    const TempDir directory;
    write_single(packed.model, directory.path());
    const int64_t layer = Checkpoint::open(directory.path()).layers().front().index;
    ASSERT_TRUE(feed.is_complete(layer)) << feed.missing().front();
    expect_values(family(), packed, *feed.layer_source(layer), layer);
    std::ranges::shuffle(packed.model.tensors, random);
  }
}

TEST_P(PackedParts, Layer_RunsAsWithTheValues) {
  const PackedModel packed = pack(family(), form());
  const TempDir directories[2];
  write_single(packed.model, directories[0].path());
  write_single(packed.values, directories[1].path());
  const Checkpoint codes = Checkpoint::open(directories[0].path());
  const Checkpoint values = Checkpoint::open(directories[1].path());
  const int64_t layer = codes.layers().front().index;
  const Tensor found = forward(codes.layer(layer).spec, *codes.layer_source(layer));
  const Tensor expected = forward(values.layer(layer).spec, *values.layer_source(layer));
  const auto* const a = found.as<float>();
  EXPECT_TRUE(
      std::equal(a, a + found.view().shape[0] * found.view().shape[1], expected.as<float>()));
  EXPECT_TRUE(std::any_of(a, a + found.view().shape[1], [](float value) { return value != 0; }));
}

// Faults of a part's tensors name the tensor, as those of experts do.
TEST_P(PackedParts, Faults_AreNamed) {
  const PackedModel packed = pack(family(), form());
  const std::string name = packed.parts.front().name;
  const std::string scale = name + "_scale";
  const auto found = [](const TinyModel& model) {
    const TempDir directory;
    write_single(model, directory.path());
    return error_of([&] {
      const Checkpoint checkpoint = Checkpoint::open(directory.path());
      const CheckpointLayer& layer = checkpoint.layers().front();
      static_cast<void>(forward(layer.spec, *checkpoint.layer_source(layer.index)));
    });
  };
  const auto expect = [&](const TinyModel& model, ErrorCode code, const std::string& tensor) {
    const auto error = found(model);
    ASSERT_TRUE(error) << tensor;
    EXPECT_EQ(error->code(), code) << error->what();
    EXPECT_NE(error->detail().tensor.find(tensor), std::string::npos) << error->what();
  };
  EXPECT_FALSE(found(packed.model));

  TinyModel model = packed.model;
  model.drop(scale);
  expect(model, ErrorCode::kTensorMissing, scale);

  model = packed.model;
  model.drop(name);
  EXPECT_TRUE(found(model));

  model = packed.model;
  model.at(scale).shape.back() += 2;
  model.at(scale).bytes.resize(model.at(scale).bytes.size() * 3);
  int64_t count = 1;
  for (const int64_t size : model.at(scale).shape) count *= size;
  model.at(scale).bytes.resize(static_cast<size_t>(count) * 4);
  expect(model, ErrorCode::kTensorShape, scale);

  model = packed.model;
  put(model.at(scale), 0, std::numeric_limits<float>::quiet_NaN());
  expect(model, ErrorCode::kTensorValue, scale);
}

}  // namespace
}  // namespace conclave::testing
