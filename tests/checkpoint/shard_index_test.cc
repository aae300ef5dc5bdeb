// Checks the index and its shards: hostile names, missing parts, both directions of disagreement.
#include "checkpoint/shard_index.h"

#include "checkpoint/tiny_model.h"

#include "conclave/checkpoint.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kIndex = "model.safetensors.index.json";

json read_index(const TempDir& directory) { return json::parse(std::ifstream(directory / kIndex)); }

class ShardIndex : public ::testing::Test {
 protected:
  void SetUp() override { write_sharded(make_tiny_model({}), directory_.path(), 3); }

  void rewrite(const std::function<void(json&)>& change) {
    json index = read_index(directory_);
    change(index);
    write_text(directory_ / kIndex, index.dump());
  }
  Error expect_error(ErrorCode code) {
    const auto error = open_error(directory_.path());
    EXPECT_TRUE(error);
    if (!error) return Error(ErrorCode::kInternal, "opened in silence");
    EXPECT_EQ(error->code(), code) << error->what();
    return *error;
  }

  static inline const std::string kTensor = "model.layers.0.mlp.gate.weight";
  TempDir directory_;
};

TEST_F(ShardIndex, HostileShardNames_EscapeNowhere) {
  write_text(directory_ / "outside.safetensors", "not a safetensors file");
  int escapes = 0;
  for (const char* name :
       {"../../etc/passwd", "/etc/passwd", "..", ".", "", "a/b.safetensors", "a\\b.safetensors",
        "../outside.safetensors", "C:model.safetensors", "\\\\host\\share\\m.safetensors",
        "sub/../model-00001-of-00003.safetensors", "./model-00001-of-00003.safetensors"}) {
    rewrite([&](json& index) { index["weight_map"][kTensor] = name; });
    const Error error = expect_error(ErrorCode::kPathEscape);
    EXPECT_EQ(error.detail().tensor, kTensor) << name;
    if (error.code() != ErrorCode::kPathEscape) ++escapes;
  }
  EXPECT_EQ(escapes, 0);
}

TEST_F(ShardIndex, NulInShardName_EscapesNowhere) {
  rewrite([&](json& index) {
    index["weight_map"][kTensor] = std::string("model-00001-of-00003.safetensors\0x", 35);
  });
  expect_error(ErrorCode::kPathEscape);
}

TEST_F(ShardIndex, LongShardName_IsRejected) {
  rewrite(
      [&](json& index) { index["weight_map"][kTensor] = std::string(300, 'a') + ".safetensors"; });
  expect_error(ErrorCode::kPathEscape);
}

TEST_F(ShardIndex, PickleShard_IsForbidden) {
  rewrite([&](json& index) { index["weight_map"][kTensor] = "pytorch_model.bin"; });
  expect_error(ErrorCode::kForbiddenFormat);
}

TEST_F(ShardIndex, SymlinkOutOfTheModel_IsRefused) {
  const TempDir elsewhere;
  fs::rename(directory_ / shard_name(1, 3), elsewhere / "stolen.safetensors");
  fs::create_symlink(elsewhere / "stolen.safetensors", directory_ / shard_name(1, 3));
  expect_error(ErrorCode::kPathEscape);
}

TEST_F(ShardIndex, SymlinkWithinTheModel_Loads) {
  fs::rename(directory_ / shard_name(1, 3), directory_ / "real.safetensors");
  fs::create_symlink("real.safetensors", directory_ / shard_name(1, 3));
  EXPECT_FALSE(open_error(directory_.path()));
}

TEST_F(ShardIndex, HuggingFaceCacheLayout_Loads) {
  const TempDir cache;
  const fs::path model = cache / "models--org--name";
  const fs::path snapshot = model / "snapshots" / "0123456789abcdef0123456789abcdef01234567";
  fs::create_directories(model / "blobs");
  fs::create_directories(snapshot);
  int blob = 0;
  for (const auto& entry : fs::directory_iterator(directory_.path())) {
    const std::string hash = std::string(63, 'a') + std::to_string(blob++);
    fs::copy(entry.path(), model / "blobs" / hash);
    fs::create_symlink(fs::path("../../blobs") / hash, snapshot / entry.path().filename());
  }
  const auto error = open_error(snapshot);
  EXPECT_FALSE(error) << error->what();
}

TEST_F(ShardIndex, MissingShard_NamesItAndListsThoseThere) {
  fs::remove(directory_ / shard_name(1, 3));
  const Error error = expect_error(ErrorCode::kIndexShardMissing);
  EXPECT_NE(error.detail().expected.find(shard_name(1, 3)), std::string::npos) << error.what();
  EXPECT_NE(error.detail().found.find(shard_name(0, 3)), std::string::npos) << error.what();
}

TEST_F(ShardIndex, DanglingSymlink_NamesTheShard) {
  fs::remove(directory_ / shard_name(1, 3));
  fs::create_symlink("nowhere.safetensors", directory_ / shard_name(1, 3));
  const auto error = open_error(directory_.path());
  ASSERT_TRUE(error);
  EXPECT_NE(std::string(error->what()).find(shard_name(1, 3)), std::string::npos) << error->what();
}

TEST_F(ShardIndex, TensorThatNoShardHolds_IsNamed) {
  rewrite([&](json& index) { index["weight_map"]["model.extra.weight"] = shard_name(2, 3); });
  const Error error = expect_error(ErrorCode::kIndexTensorMissing);
  EXPECT_EQ(error.detail().tensor, "model.extra.weight");
  EXPECT_NE(error.detail().expected.find(shard_name(2, 3)), std::string::npos) << error.what();
}

TEST_F(ShardIndex, TensorThatTheIndexDoesNotList_IsNamed) {
  rewrite([&](json& index) { index["weight_map"].erase(kTensor); });
  EXPECT_EQ(expect_error(ErrorCode::kIndexTensorUnlisted).detail().tensor, kTensor);
}

TEST_F(ShardIndex, TensorInAnotherShard_IsNamed) {
  const std::string holds = read_index(directory_)["weight_map"][kTensor];
  const std::string other = holds == shard_name(0, 3) ? shard_name(1, 3) : shard_name(0, 3);
  rewrite([&](json& index) { index["weight_map"][kTensor] = other; });
  const Error error = expect_error(ErrorCode::kIndexTensorUnlisted);
  EXPECT_EQ(error.detail().tensor, kTensor);
  EXPECT_NE(error.detail().expected.find(other), std::string::npos) << error.what();
}

TEST_F(ShardIndex, BadWeightMaps_AreRejected) {
  for (const char* text : {"{}", "[]", "3", R"({"weight_map": null})", R"({"weight_map": []})",
                           R"({"weight_map": "x"})", R"({"weight_map": {}})"}) {
    write_text(directory_ / kIndex, text);
    expect_error(ErrorCode::kIndexNoWeightMap);
  }
  write_text(directory_ / kIndex, R"({"weight_map": {"a": 3}})");
  expect_error(ErrorCode::kJsonType);
  write_text(directory_ / kIndex,
             R"({"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}})");
  expect_error(ErrorCode::kJsonDuplicateKey);
  write_text(directory_ / kIndex, R"({"weight_map": )");
  expect_error(ErrorCode::kJsonSyntax);
}

TEST_F(ShardIndex, TruncatedShard_IsNamed) {
  const fs::path shard = directory_ / shard_name(2, 3);
  fs::resize_file(shard, fs::file_size(shard) - 100);
  const Error error = expect_error(ErrorCode::kSafetensorsTruncatedData);
  EXPECT_NE(error.detail().file.find(shard_name(2, 3)), std::string::npos) << error.what();
}

TEST_F(ShardIndex, SingleFileBesideIndex_IsPreferredAndNoted) {
  write_single(make_tiny_model({}), directory_.path());
  const Checkpoint checkpoint = Checkpoint::open(directory_.path());
  ASSERT_FALSE(checkpoint.notes().empty());
  EXPECT_NE(checkpoint.notes()[0].find(kIndex), std::string::npos);
}

TEST(ModelDirectory, OnlyPickles_IsForbiddenWithAdvice) {
  const TempDir directory;
  write_text(directory / "config.json", make_tiny_model({}).config.dump());
  write_text(directory / "pytorch_model-00001-of-00002.bin", "PK");
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kForbiddenFormat);
  EXPECT_NE(error->detail().found.find("pytorch_model-00001-of-00002.bin"), std::string::npos);
  EXPECT_NE(error->detail().hint.find("save_pretrained"), std::string::npos);
}

TEST(ModelDirectory, PickleInDisguise_IsForbidden) {
  const TempDir directory;
  write_text(directory / "config.json", make_tiny_model({}).config.dump());
  write_text(directory / "model.safetensors", std::string("PK\x03\x04", 4) + std::string(100, 'x'));
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kForbiddenFormat) << error->what();
}

TEST(ModelDirectory, ShardsWithoutIndex_SayWhatIsMissing) {
  const TempDir directory;
  write_sharded(make_tiny_model({}), directory.path(), 2);
  fs::remove(directory / kIndex);
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kFileNotFound);
  EXPECT_NE(error->detail().found.find(shard_name(0, 2)), std::string::npos) << error->what();
}

TEST(ModelDirectory, MissingDirectoryOrConfig_IsNotFound) {
  const TempDir directory;
  const auto no_config = open_error(directory.path());
  ASSERT_TRUE(no_config);
  EXPECT_EQ(no_config->code(), ErrorCode::kFileNotFound);
  EXPECT_NE(std::string(no_config->what()).find("config.json"), std::string::npos);
  const auto no_directory = open_error(directory / "nowhere");
  ASSERT_TRUE(no_directory);
  EXPECT_EQ(no_directory->code(), ErrorCode::kFileNotFound);
}

}  // namespace
}  // namespace conclave::testing
