#include "checkpoint/golden_folder.h"
#include "checkpoint/tiny_model.h"

#include "conclave/checkpoint.h"
#include "conclave/error.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

using nlohmann::json;

constexpr const char* kOwn = "quantization";
constexpr const char* kShared = "quantization_config";
constexpr const char* kDown = "model.layers.0.mlp.switch_mlp.down_proj";

// A model of MLX, with these settings under the two keys; null: without the key.
TinyModel mlx_model(const json& own, const json& shared) {
  TinyModel model = golden_folder("qwen3_moe-mlx-4bit");
  for (const auto& [key, value] : {std::pair(kOwn, own), std::pair(kShared, shared)}) {
    model.config.erase(key);
    if (!value.is_null()) model.config[key] = value;
  }
  return model;
}

json settings() { return golden_folder("qwen3_moe-mlx-4bit").config[kOwn]; }

json with(json object, const char* key, const json& value) {
  object[key] = value;
  return object;
}

Checkpoint open_model(const TinyModel& model) {
  const TempDir directory;
  write_single(model, directory.path());
  return Checkpoint::open(directory.path());
}

TEST(QuantizationKeys, OneOrBothAlike_AreRead) {
  const json found = settings();
  for (const auto& [own, shared] :
       {std::pair(found, json()), std::pair(json(), found), std::pair(found, found),
        std::pair(with(found, "mode", nullptr), found), std::pair(json("int4"), found)}) {
    const Checkpoint checkpoint = open_model(mlx_model(own, shared));
    EXPECT_TRUE(checkpoint.layer(0).support) << checkpoint.layer(0).support.reason();
    EXPECT_EQ(checkpoint.layer(0).spec.weight_dtype, DType::kI4) << own << " " << shared;
  }
}

struct Difference {
  json own;
  json shared;
  std::vector<std::string> said;
};

TEST(QuantizationKeys, ThatDiffer_AreNamedWithBothValues) {
  const json found = settings();
  const json eight = {{"bits", 8}, {"group_size", 32}};
  const json own = with(found, kDown, eight);
  const std::string own_bits = std::string("quantization.\"") + kDown + "\".bits";
  const std::vector<Difference> cases = {
      {with(found, "bits", 8), found, {"quantization.bits", "found 8", "expected 4"}},
      {found,
       with(found, "mode", "mxfp4"),
       {"quantization_config.mode", "\"mxfp4\"", "no such key"}},
      {with(found, "mode", "affine"), found, {"quantization.mode", "\"affine\"", "no such key"}},
      {own, found, {kDown, "an object", "no such key, as in quantization_config"}},
      {own, with(found, kDown, with(eight, "bits", 5)), {own_bits, "found 8", "expected 5"}},
      {with(found, kDown, false),
       with(found, kDown, true),
       {kDown, "found false", "expected true"}},
      {with(found, "ignore", {1, 2}), with(found, "ignore", {1}), {"ignore", "1 items"}},
      {with(found, "ignore", {1, 2}), with(found, "ignore", {1, 3}), {"ignore[1]", "3", "2"}},
      {with(found, "mode", 1.5), with(found, "mode", "x"), {"quantization.mode", "1.5", "\"x\""}}};
  for (const Difference& each : cases) {
    const auto error = error_of([&] { open_model(mlx_model(each.own, each.shared)); });
    ASSERT_TRUE(error) << each.own << " " << each.shared;
    const std::string text = error->what();
    EXPECT_EQ(error->code(), ErrorCode::kConfigValue) << text;
    EXPECT_NE(text.find("config.json"), std::string::npos) << text;
    for (const std::string& part : each.said) EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace conclave::testing
