// GGUF files that lack a tensor of a MoE layer: no such file is read as a layer of another kind.
#include "conclave/checkpoint.h"
#include "conclave/error.h"
#include "conclave/gguf.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;
const fs::path kGgufModels = "testdata/gguf";

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(kGgufModels)) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

GgufReader open_model(const std::string& name) {
  for (const auto& entry : fs::directory_iterator(kGgufModels / name)) {
    const std::string file = entry.path().filename().string();
    if (file == "model.gguf" || file.starts_with("model-00001-of-")) {
      return GgufReader::open(entry.path());
    }
  }
  throw Error(ErrorCode::kFileNotFound, name);
}

// What a copy of a model has otherwise.
struct Changes {
  std::function<bool(std::string_view tensor)> drops = [](std::string_view) { return false; };
  std::vector<GgufKey> keys = {};  // beside the model's, or in place of them
  std::function<std::vector<int64_t>(const GgufTensorInfo& tensor)> shape_of =
      [](const GgufTensorInfo& tensor) { return tensor.shape; };
};

fs::path copy_path() {
  std::string test = ::testing::UnitTest::GetInstance()->current_test_info()->name();
  std::replace(test.begin(), test.end(), '/', '-');
  return fs::path(::testing::TempDir()) / (test + ".gguf");
}

// A copy of the model in one file, with zeros for all values, since opening reads none.
fs::path write_copy(const GgufReader& model, const Changes& changes) {
  const fs::path path = copy_path();
  std::vector<GgufKey> keys = changes.keys;
  for (GgufKey& key : model.keys()) {
    const bool is_replaced = std::ranges::any_of(
        changes.keys, [&](const GgufKey& other) { return other.name == key.name; });
    if (!is_replaced && !key.name.starts_with("split.")) keys.push_back(std::move(key));
  }
  GgufWriter writer(path, keys, model.alignment());
  for (const GgufTensorInfo& tensor : model.tensors()) {
    if (changes.drops(tensor.name)) continue;
    writer.declare(tensor.name, tensor.type, changes.shape_of(tensor));
  }
  writer.finish_with_zeros();
  return path;
}

std::optional<Error> error_of(const fs::path& path) {
  try {
    Checkpoint::open(path);
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

bool has_part(std::string_view name, std::string_view part) {
  return name.find(part) != std::string_view::npos;
}

class GgufWithoutATensor : public ::testing::TestWithParam<std::string> {
 protected:
  // Files of their architecture may do without in all layers, and these models have one.
  static bool may_be_absent(std::string_view model, std::string_view tensor) {
    const bool single = model != "llama-split" && model != "deepseek2-q5_0";
    if (!single) return false;
    const bool optional_gate = model.starts_with("llama-") && has_part(tensor, "ffn_gate_exps.");
    const bool optional_bias = (model.starts_with("step35") || model.starts_with("hy_v3")) &&
                               has_part(tensor, "exp_probs_b");
    const bool no_key = has_part(tensor, "_exps.scale") || has_part(tensor, "ffn_latent_");
    return optional_gate || optional_bias || no_key;
  }
};

TEST_P(GgufWithoutATensor, EachOfItsExperts_IsNamedWithTheFile) {
  const GgufReader model = open_model(GetParam());
  ASSERT_EQ(error_of(write_copy(model, {})), std::nullopt);
  int64_t checked = 0;
  for (const GgufTensorInfo& tensor : model.tensors()) {
    const std::string& name = tensor.name;
    if (has_part(name, "ffn_norm") || may_be_absent(GetParam(), name)) continue;
    SCOPED_TRACE(name);
    const auto error = error_of(
        write_copy(model, {.drops = [&](std::string_view other) { return other == name; }}));
    ASSERT_TRUE(error) << "no error";
    EXPECT_EQ(error->code(), ErrorCode::kTensorMissing) << error->what();
    EXPECT_EQ(error->detail().file, copy_path().string());
    // A fused tensor could as well be two.
    const size_t fused = name.find("ffn_gate_up_exps");
    EXPECT_EQ(error->detail().tensor,
              fused == name.npos ? name : name.substr(0, fused) + "ffn_up_exps.weight");
    ++checked;
  }
  EXPECT_GE(checked, 3);
}

INSTANTIATE_TEST_SUITE_P(Models, GgufWithoutATensor, ::testing::ValuesIn(model_names()),
                         [](const auto& row) {
                           std::string name = row.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

std::string missing_of(const std::string& model, const Changes& changes) {
  const auto error = error_of(write_copy(open_model(model), changes));
  if (!error) return "no error";
  return error->code() == ErrorCode::kTensorMissing ? error->detail().tensor : error->what();
}

TEST(GgufMissing, AllOfSharedExperts_AreMissedIfAKeyHasThem) {
  const auto shared = [](std::string_view name) { return has_part(name, "_shexp."); };
  EXPECT_EQ(missing_of("qwen2moe-f16", {.drops = shared}), "blk.0.ffn_down_shexp.weight")
      << "the architecture always has them";
  EXPECT_EQ(missing_of("deepseek2-q5_0", {.drops = shared}), "blk.1.ffn_down_shexp.weight");
  EXPECT_EQ(missing_of("deepseek2-greedy", {.drops = shared}), "no error");
  EXPECT_EQ(
      missing_of("deepseek2-greedy",
                 {.drops = shared, .keys = {GgufKey::of_u32("deepseek2.expert_shared_count", 1)}}),
      "blk.0.ffn_down_shexp.weight");
  EXPECT_EQ(
      missing_of("qwen3moe-iq4",
                 {.keys = {GgufKey::of_u32("qwen3moe.expert_shared_feed_forward_length", 64)}}),
      "no error")
      << "the architecture has none and does not read the key";
}

TEST(GgufMissing, AllOfABlocksExperts_AreMissedUnlessItIsDense) {
  const auto second = [](std::string_view name) {
    return name.starts_with("blk.1.ffn") && !has_part(name, "ffn_norm");
  };
  EXPECT_EQ(missing_of("llama-split", {.drops = second}), "blk.1.ffn_gate_inp.weight");
  const auto whole = [](std::string_view name) { return name.starts_with("blk.1."); };
  EXPECT_EQ(missing_of("llama-split", {.drops = whole}), "no error");
}

TEST(GgufMissing, GateInNoLayer_IsTheArchitecturesChoice) {
  const auto gates = [](std::string_view name) { return has_part(name, "ffn_gate_exps."); };
  EXPECT_EQ(missing_of("llama-split", {.drops = gates}), "no error");
  EXPECT_EQ(missing_of("qwen3moe-iq4", {.drops = gates}), "blk.0.ffn_gate_exps.weight");
}

TEST(GgufMissing, ProjectionsAndTables_AreMissedIfAKeyHasThem) {
  const auto latent = [](std::string_view name) { return has_part(name, "ffn_latent_"); };
  EXPECT_EQ(missing_of(
                "nemotron-latent",
                {.drops = latent, .keys = {GgufKey::of_u32("nemotron_h_moe.moe_latent_size", 32)}}),
            "blk.0.ffn_latent_down.weight");
  const auto table = [](std::string_view name) { return has_part(name, "tid2eid"); };
  EXPECT_EQ(missing_of("deepseek4-hash", {.drops = table}), "blk.0.ffn_gate_tid2eid.weight");
}

// Half as many experts of twice as many rows: the rows of all are as many as the keys say.
TEST(GgufShapes, StackOfAnotherNumberOfExperts_IsNamed) {
  const GgufReader model = open_model("qwen3moe-q4_k_m");
  for (const char* const matrix : {"gate", "up", "down"}) {
    const std::string name = "blk.0.ffn_" + std::string(matrix) + "_exps.weight";
    const auto folded = [&](const GgufTensorInfo& tensor) {
      std::vector<int64_t> shape = tensor.shape;
      if (tensor.name == name) shape = {shape[0] / 2, 2 * shape[1], shape[2]};
      return shape;
    };
    const auto error = error_of(write_copy(model, {.shape_of = folded}));
    ASSERT_TRUE(error) << name;
    EXPECT_EQ(error->code(), ErrorCode::kTensorShape) << error->what();
    EXPECT_EQ(error->detail().file, copy_path().string());
    EXPECT_EQ(error->detail().tensor, name);
  }
}

TEST(GgufMissing, DenseByKeyButWithExperts_NamesTheKey) {
  const GgufReader model = open_model("deepseek2-q5_0");
  const std::string key = "deepseek2.leading_dense_block_count";
  const auto error = error_of(write_copy(model, {.keys = {GgufKey::of_u32(key, 2)}}));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kConfigValue);
  EXPECT_EQ(error->detail().file, copy_path().string());
  EXPECT_EQ(error->detail().tensor, key);
  EXPECT_TRUE(error->detail().found.starts_with("2, and the tensor blk.1.")) << error->what();
}

TEST(GgufKeys, GroupsOfExpertsThatAreUneven_NameTheKey) {
  const std::string key = "deepseek2.expert_group_count";
  const GgufReader model = open_model("deepseek2-q5_0");
  for (const uint32_t groups : {3U, 16U}) {  // the model has 16 experts
    const auto error = error_of(write_copy(model, {.keys = {GgufKey::of_u32(key, groups)}}));
    ASSERT_TRUE(error) << groups;
    EXPECT_EQ(error->code(), ErrorCode::kConfigValue) << error->what();
    EXPECT_EQ(error->detail().file, copy_path().string());
    EXPECT_EQ(error->detail().tensor, key);
    EXPECT_EQ(error->detail().found, std::to_string(groups));
  }
  EXPECT_EQ(error_of(write_copy(model, {.keys = {GgufKey::of_u32(key, 8)}})), std::nullopt);
}

}  // namespace
}  // namespace conclave::testing
