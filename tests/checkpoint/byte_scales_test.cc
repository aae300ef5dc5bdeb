// Scales of float codes that files hold as bytes with exponents, of any method and layout: a layer
// is that of scales in e8m0.
#include "checkpoint/golden_folder.h"
#include "checkpoint/tiny_model.h"

#include "conclave/checkpoint.h"
#include "conclave/context.h"
#include "conclave/layer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

bool is_scale(const std::string& name) {
  return name.ends_with("_scale_inv") || name.ends_with("_scale");
}
bool is_of_rows(const std::string& name) { return name.find("input") != std::string::npos; }

// The golden folder with exponents for scales, which differ and lie in tensors of this type.
TinyModel with_exponents(const std::string& folder, DType dtype) {
  TinyModel model = golden_folder(folder);
  for (const TinyTensor& tensor : std::vector<TinyTensor>(model.tensors)) {
    if (!is_scale(tensor.name) || is_of_rows(tensor.name)) continue;
    model.drop(tensor.name);
    TinyTensor& scale = model.add(tensor.name, dtype, tensor.shape);
    for (size_t i = 0; i < scale.bytes.size(); ++i) {
      scale.bytes[i] = static_cast<std::byte>(i == 0 ? 0 : 118 + i % 7);
    }
  }
  return model;
}

Checkpoint opened(const std::string& folder, const TinyModel& model, const TempDir& directory) {
  write_single(model, directory.path());
  const auto beside = std::filesystem::path("testdata/quantised") / folder / "hf_quant_config.json";
  if (std::filesystem::exists(beside)) {
    std::filesystem::copy_file(beside, directory / "hf_quant_config.json");
  }
  return Checkpoint::open(directory.path());
}

void expect_same(const WeightSource& found, const WeightSource& expected, const MoeSpec& spec) {
  for (const WeightId matrix : {weights::kGate, weights::kUp, weights::kDown}) {
    const WeightId id = matrix.with(WeightPlane::kScale);
    const WeightInfo info = found.describe(id);
    EXPECT_EQ(info.dtype, DType::kF8E8M0) << to_string(id);
    EXPECT_EQ(expected.describe(id).dtype, DType::kF8E8M0) << to_string(id);
    for (int64_t expert = 0; expert < spec.num_experts; ++expert) {
      EXPECT_EQ(read_matrix(found, id, expert), read_matrix(expected, id, expert))
          << to_string(id) << " of expert " << expert;
    }
  }
}

class ByteScales : public ::testing::TestWithParam<const char*> {};

TEST_P(ByteScales, InFiles_AreExponents) {
  const TempDir directories[2];
  const Checkpoint bytes =
      opened(GetParam(), with_exponents(GetParam(), DType::kU8), directories[0]);
  const Checkpoint named =
      opened(GetParam(), with_exponents(GetParam(), DType::kF8E8M0), directories[1]);
  ASSERT_TRUE(bytes.layer(0).support) << bytes.layer(0).support.reason();
  EXPECT_EQ(bytes.layer(0).spec.quant, named.layer(0).spec.quant);
  const auto found = bytes.layer_source(0);
  expect_same(*found, *named.layer_source(0), bytes.layer(0).spec);
  const Context context({.num_threads = 1});
  EXPECT_NO_THROW(static_cast<void>(MoeLayer::create(context, bytes.layer(0).spec, *found)));
}

TEST_P(ByteScales, InAFeed_AreExponents) {
  const TempDir directory;
  const Checkpoint named =
      opened(GetParam(), with_exponents(GetParam(), DType::kF8E8M0), directory);
  const TinyModel model = with_exponents(GetParam(), DType::kU8);
  const auto fed = [&](CheckpointFeed feed) {
    for (const TinyTensor& tensor : model.tensors) {
      static_cast<void>(feed.put(tensor.name, {.data = tensor.bytes.data(),
                                               .dtype = tensor.dtype,
                                               .shape = Shape(std::span(tensor.shape))}));
    }
    ASSERT_TRUE(feed.is_complete(0)) << feed.missing().front();
    expect_same(*feed.layer_source(0), *named.layer_source(0), feed.layer(0).spec);
  };
  if (model.config.contains("quantization_config")) {
    fed(CheckpointFeed::from_config(model.config.dump()));
  }
  const std::vector<int64_t> layers = {0};
  fed(CheckpointFeed::from_spec(named.layer(0).spec, model.config["model_type"].get<std::string>(),
                                layers));
}

TEST_P(ByteScales, ThatAreNoNumber_AreNamed) {
  TinyModel model = with_exponents(GetParam(), DType::kU8);
  std::string name;
  for (TinyTensor& tensor : model.tensors) {
    if (is_scale(tensor.name) && !is_of_rows(tensor.name)) name = tensor.name;
  }
  model.at(name).bytes.back() = std::byte{255};
  const TempDir directory;
  const Checkpoint checkpoint = opened(GetParam(), model, directory);
  const auto source = checkpoint.layer_source(0);
  const Context context({.num_threads = 1});
  const auto error = error_of(
      [&] { static_cast<void>(MoeLayer::create(context, checkpoint.layer(0).spec, *source)); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorValue) << error->what();
  EXPECT_NE(error->detail().tensor.find(name), std::string::npos) << error->what();
}

// By block, channel and matrix; of experts by themselves, in stacks, and shared ones.
INSTANTIATE_TEST_SUITE_P(Folders, ByteScales,
                         ::testing::Values("deepseek_v3-fp8-block", "mixtral-compressed-block32",
                                           "mixtral-compressed-channel",
                                           "qwen3_moe-compressed-tensor-static",
                                           "mixtral-modelopt-fp8", "mixtral-modelopt-block",
                                           "qwen3_moe-fp8-stacked"),
                         [](const auto& instance) {
                           std::string name = instance.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

// Integers have no such scales, and beside a number of the matrix bytes may be floats.
TEST(ByteScalesOfOthers, AreRefused) {
  for (const char* folder : {"qwen3_moe-compressed-int8-channel", "qwen3_moe-modelopt-nvfp4"}) {
    const TempDir directory;
    const auto error = error_of(
        [&] { static_cast<void>(opened(folder, with_exponents(folder, DType::kU8), directory)); });
    ASSERT_TRUE(error) << folder;
    EXPECT_EQ(error->code(), ErrorCode::kTensorDType) << error->what();
    EXPECT_TRUE(is_scale(error->detail().tensor)) << error->what();
    EXPECT_EQ(error->detail().found, "U8");
  }
}

// A router in codes is read as values, and its scales likewise.
TEST(ByteScalesOfRouters, AreExponents) {
  const auto router_of = [](DType dtype) {
    TinyModel model = with_exponents("qwen3_moe-compressed-block", dtype);
    const std::string name = "model.layers.0.mlp.gate.weight";
    const std::vector<int64_t> shape = model.at(name).shape;
    model.drop(name);
    std::ranges::fill(model.add(name, DType::kF8E4M3, shape).bytes, std::byte{0x38});
    std::vector<int64_t> blocks = {1, (shape[1] + 127) / 128};
    std::ranges::fill(model.add(name + "_scale", dtype, blocks).bytes, std::byte{130});
    model.config["quantization_config"]["ignore"] = nlohmann::json::array();
    const TempDir directory;
    const Checkpoint checkpoint = opened("qwen3_moe-compressed-block", model, directory);
    return read_matrix(*checkpoint.layer_source(0), weights::kRouter, 0);
  };
  const auto found = router_of(DType::kU8);
  EXPECT_EQ(found, router_of(DType::kF8E8M0));
  float first = 0;
  std::memcpy(&first, found.data(), sizeof(first));
  EXPECT_EQ(first, 8.0F);
}

}  // namespace
}  // namespace conclave::testing
