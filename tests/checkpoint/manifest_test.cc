// With a manifest, no damaged byte leaves the checkpoint.
#include "checkpoint/manifest.h"

#include "checkpoint/hash.h"
#include "checkpoint/tiny_model.h"

#include "conclave/checkpoint.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kManifest = "conclave.manifest.json";

// Reads everything that a layer would; returns the error, if any.
std::optional<Error> read_all(const fs::path& directory, FileAccess access) {
  return error_of([&] {
    const Checkpoint checkpoint =
        Checkpoint::open(directory, {.access = access, .verify_manifest = true});
    for (const CheckpointLayer& layer : checkpoint.layers()) {
      const auto source = checkpoint.layer_source(layer.index);
      for (const WeightId id : weights::kAll) {
        const WeightInfo info = source->describe(id);
        for (int64_t expert = 0; expert < info.count; ++expert) {
          read_matrix(*source, id, expert);
          source->view(id, expert);
        }
      }
    }
  });
}

void flip_bit(const fs::path& path, uint64_t byte, int bit) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(byte));
  char value = 0;
  file.get(value);
  file.seekp(static_cast<std::streamoff>(byte));
  file.put(static_cast<char>(value ^ (1 << bit)));
}

TEST(Manifest, FreshManifest_Verifies) {
  for (Layout layout : {Layout::kPerExpert, Layout::kStacked, Layout::kStackedTransposed}) {
    const TempDir directory;
    write_sharded(make_tiny_model({.family = "qwen2_moe", .layout = layout}), directory.path(), 2);
    Checkpoint::write_manifest(directory.path());
    for (FileAccess access : {FileAccess::kMap, FileAccess::kRead}) {
      const auto error = read_all(directory.path(), access);
      EXPECT_FALSE(error) << error->what();
    }
  }
}

TEST(Manifest, RandomBitFlips_AreAllDetected) {
  constexpr int kTrials = 1000;
  const TempDir directory;
  const TinyModel model = make_tiny_model({.family = "qwen2_moe"});
  write_single(model, directory.path());
  Checkpoint::write_manifest(directory.path());
  const fs::path file = directory / "model.safetensors";
  std::vector<TensorInfo> moe;
  {
    const SafetensorsFile safetensors = SafetensorsFile::open(file);
    for (const TensorInfo& tensor : safetensors.tensors()) {
      if (tensor.name.find("layers.0.mlp.") != std::string::npos ||
          tensor.name.find("layers.2.mlp.") != std::string::npos) {
        moe.push_back(tensor);
      }
    }
  }
  std::mt19937_64 random(20240501);
  int detected = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    const TensorInfo& tensor = moe[random() % moe.size()];
    const uint64_t byte = tensor.file_offset + random() % tensor.bytes;
    const int bit = static_cast<int>(random() % 8);
    flip_bit(file, byte, bit);
    const auto error = read_all(directory.path(), trial % 2 ? FileAccess::kMap : FileAccess::kRead);
    if (error && error->code() == ErrorCode::kChecksum && error->detail().tensor == tensor.name) {
      ++detected;
    } else {
      ADD_FAILURE() << "byte " << byte << " bit " << bit << " of " << tensor.name << ": "
                    << (error ? error->what() : "loaded in silence");
    }
    flip_bit(file, byte, bit);
  }
  EXPECT_EQ(detected, kTrials);
  RecordProperty("bit_flips_detected", detected);
}

TEST(Manifest, SwappedTensorsOfOneShape_AreDetected) {
  TinyModel model = make_tiny_model({});
  const TempDir directory;
  write_single(model, directory.path());
  Checkpoint::write_manifest(directory.path());
  std::swap(model.at("model.layers.0.mlp.experts.0.gate_proj.weight").name,
            model.at("model.layers.0.mlp.experts.1.up_proj.weight").name);
  write_single(model, directory.path());
  const auto error = read_all(directory.path(), FileAccess::kAuto);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kChecksum);
}

TEST(Manifest, DamagedBlock_GivesNoByteAwayButOthersStillRead) {
  // Slices of a stack are hashed separately once they are large enough.
  const TinyOptions options{.layout = Layout::kStacked, .hidden_size = 64, .intermediate_size = 48};
  const TempDir directory;
  write_single(make_tiny_model(options), directory.path());
  Checkpoint::write_manifest(directory.path());
  uint64_t middle_of_expert_2 = 0;
  {
    const SafetensorsFile file = SafetensorsFile::open(directory / "model.safetensors");
    const TensorInfo* tensor = file.find("model.layers.0.mlp.experts.down_proj");
    middle_of_expert_2 = tensor->file_offset + tensor->bytes / 2;
  }
  flip_bit(directory / "model.safetensors", middle_of_expert_2, 3);
  const Checkpoint checkpoint =
      Checkpoint::open(directory.path(), {.access = FileAccess::kMap, .verify_manifest = true});
  const auto source = checkpoint.layer_source(0);
  const auto expected = tiny_matrix(options.dtype, 0, weights::kDown, 3, 64, 48);
  EXPECT_EQ(read_matrix(*source, weights::kDown, 3), expected);
  std::vector<std::byte> first_row(48 * 2, std::byte{0});
  const auto error = error_of([&] { source->read(weights::kDown, 2, {0, 1, 0, 48}, first_row); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kChecksum);
  EXPECT_EQ(error->detail().tensor, "model.layers.0.mlp.experts.down_proj");
  EXPECT_NE(error->detail().what.find("slice 2"), std::string::npos) << error->what();
  EXPECT_EQ(first_row, std::vector<std::byte>(48 * 2, std::byte{0}));
  std::vector<std::byte> whole(64 * 48 * 2, std::byte{7});
  EXPECT_TRUE(error_of([&] { source->read(weights::kDown, 2, {0, 64, 0, 48}, whole); }));
  EXPECT_EQ(whole, std::vector<std::byte>(whole.size(), std::byte{0}));
  EXPECT_TRUE(error_of([&] { source->view(weights::kDown, 2); }));
}

TEST(Manifest, Absent_IsNotFoundWithAdvice) {
  const TempDir directory;
  write_single(make_tiny_model({}), directory.path());
  const auto error =
      error_of([&] { Checkpoint::open(directory.path(), {.verify_manifest = true}); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kFileNotFound);
  EXPECT_NE(error->detail().hint.find("write_manifest"), std::string::npos);
}

TEST(Manifest, OtherTensorSet_IsNamed) {
  const TinyModel model = make_tiny_model({});
  const TempDir directory;
  const auto verify = [&] {
    return error_of([&] { Checkpoint::open(directory.path(), {.verify_manifest = true}); });
  };
  TinyModel more = model;
  more.add("model.new_norm.weight", DType::kBF16, {3});
  write_single(model, directory.path());
  Checkpoint::write_manifest(directory.path());
  write_single(more, directory.path());
  auto error = verify();
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kChecksum);
  EXPECT_EQ(error->detail().tensor, "model.new_norm.weight");

  Checkpoint::write_manifest(directory.path());
  write_single(model, directory.path());
  error = verify();
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kChecksum);
  EXPECT_EQ(error->detail().tensor, "model.new_norm.weight");

  TinyModel reshaped = more;
  reshaped.at("model.new_norm.weight").shape = {3, 1};
  write_single(reshaped, directory.path());
  error = verify();
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kChecksum);
  EXPECT_EQ(error->detail().found, "BF16 [3, 1]");
}

TEST(Manifest, MalformedManifests_AreRejected) {
  const TempDir directory;
  write_single(make_tiny_model({}), directory.path());
  Checkpoint::write_manifest(directory.path());
  const json good = json::parse(std::ifstream(directory / kManifest));
  const auto code_of = [&](const std::string& text) {
    write_text(directory / kManifest, text);
    const auto error =
        error_of([&] { Checkpoint::open(directory.path(), {.verify_manifest = true}); });
    return error ? error->code() : ErrorCode::kInternal;
  };
  const auto changed = [&](const std::function<void(json&)>& change) {
    json manifest = good;
    change(manifest);
    return code_of(manifest.dump());
  };
  const std::string tensor = "lm_head.weight";
  EXPECT_EQ(code_of(good.dump()), ErrorCode::kInternal);  // no error
  EXPECT_EQ(code_of("{"), ErrorCode::kJsonSyntax);
  EXPECT_EQ(code_of("{}"), ErrorCode::kConfigMissingKey);
  EXPECT_EQ(changed([](json& m) { m["format"] = "other"; }), ErrorCode::kConfigValue);
  EXPECT_EQ(changed([](json& m) { m["version"] = 2; }), ErrorCode::kConfigValue);
  EXPECT_EQ(changed([](json& m) { m["hash"] = "md5"; }), ErrorCode::kConfigValue);
  EXPECT_EQ(changed([](json& m) { m["tensors"] = 1; }), ErrorCode::kJsonType);
  EXPECT_EQ(changed([&](json& m) { m["tensors"][tensor]["hashes"] = json::array(); }),
            ErrorCode::kConfigValue);
  EXPECT_EQ(changed([&](json& m) { m["tensors"][tensor]["hashes"][0] = "xyz"; }),
            ErrorCode::kConfigValue);
  EXPECT_EQ(changed([&](json& m) { m["tensors"][tensor]["hashes"][0] = 5; }), ErrorCode::kJsonType);
}

TEST(Manifest, UnwritableDirectory_IsAnError) {
  const auto error = error_of([] { Checkpoint::write_manifest("/proc/self"); });
  ASSERT_TRUE(error);
}

TEST(Hash, PiecesAndWhole_Agree) {
  std::vector<std::byte> bytes(100'003);
  std::mt19937 random(1);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  checkpoint::StreamHash stream;
  for (size_t done = 0, step = 1; done < bytes.size(); done += step, step = step * 2 + 1) {
    step = std::min(step, bytes.size() - done);
    stream.update(std::span(bytes).subspan(done, step));
  }
  EXPECT_EQ(stream.digest(), checkpoint::hash_bytes(bytes));
  // The published value of XXH3-64 with seed 0 for empty input.
  EXPECT_EQ(checkpoint::hash_bytes({}), 0x2d06800538d394c2ULL);
}

}  // namespace
}  // namespace conclave::testing
