// Directories that hold GGUF models in place of a Hugging Face one.
#include "checkpoint/tiny_model.h"

#include "conclave/checkpoint.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;

const fs::path kSplit = "testdata/gguf/llama-split";
const fs::path kWhole = "testdata/gguf/qwen3moe-q4_k_m/model.gguf";

TEST(GgufDirectory, OneModel_IsOpened) {
  const Checkpoint by_directory = Checkpoint::open(kWhole.parent_path());
  const Checkpoint by_file = Checkpoint::open(kWhole);
  EXPECT_EQ(by_directory.directory(), by_file.directory());
  EXPECT_EQ(by_directory.total_bytes(), by_file.total_bytes());
}

TEST(GgufDirectory, PartsOfOneModel_AreOneModel) {
  const Checkpoint checkpoint = Checkpoint::open(kSplit);
  EXPECT_EQ(checkpoint.directory().filename(), "model-00001-of-00003.gguf");
  EXPECT_FALSE(checkpoint.layers().empty());
}

TEST(GgufDirectory, ProjectorsAndOtherFiles_DoNotCount) {
  const TempDir directory;
  fs::copy_file(kWhole, directory / "tiny-Q4_K_M.gguf");
  write_text(directory / "mmproj-tiny-f16.gguf", "no model");
  write_text(directory / "README.md", "text");
  fs::create_directory(directory / "old.gguf");
  EXPECT_EQ(Checkpoint::open(directory.path()).directory().filename(), "tiny-Q4_K_M.gguf");
}

TEST(GgufDirectory, Configuration_ComesFirst) {
  const TempDir directory;
  write_single(make_tiny_model({}), directory.path());
  fs::copy_file(kWhole, directory / "model.gguf");
  EXPECT_EQ(Checkpoint::open(directory.path()).directory(), directory.path());
}

TEST(GgufDirectory, SeveralModels_AreNamed) {
  const TempDir directory;
  for (int i = 0; i < 10; ++i) {
    write_text(directory / ("model-Q" + std::to_string(i) + ".gguf"), "never read");
  }
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kFileNotFound);
  const std::string what = error->what();
  EXPECT_NE(what.find("model-Q0.gguf, model-Q1.gguf"), std::string::npos) << what;
  EXPECT_NE(what.find("and 2 more"), std::string::npos) << what;
}

TEST(GgufDirectory, EightModels_AreAllNamedInOrder) {
  const TempDir directory;
  for (const char* letter : {"d", "h", "a", "f", "c", "g", "b", "e"}) {
    write_text(directory / (std::string(letter) + ".gguf"), "never read");
  }
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  const std::string what = error->what();
  EXPECT_NE(what.find("a.gguf, b.gguf, c.gguf, d.gguf, e.gguf, f.gguf, g.gguf, h.gguf"),
            std::string::npos)
      << what;
  EXPECT_EQ(what.find("more"), std::string::npos) << what;
}

// Names that end almost as those of parts are models of their own.
TEST(GgufDirectory, NamesThatResembleParts_AreModels) {
  for (const char* name : {"tiny-00002-of-parts.gguf", "tiny-0000b-of-00003.gguf",
                           "tiny_00002-of-00003.gguf", "tiny-00002-in-00003.gguf"}) {
    const TempDir directory;
    fs::copy_file(kWhole, directory / name);
    EXPECT_EQ(Checkpoint::open(directory.path()).directory().filename(), name);
  }
}

TEST(GgufDirectory, LaterPartsAlone_AreNoModel) {
  const TempDir directory;
  fs::copy_file(kSplit / "model-00002-of-00003.gguf", directory / "model-00002-of-00003.gguf");
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kFileNotFound);
}

TEST(GgufDirectory, Manifest_IsThatOfTheFile) {
  const TempDir directory;
  fs::copy_file(kWhole, directory / "model.gguf");
  const fs::path written = Checkpoint::write_manifest(directory.path());
  EXPECT_EQ(written, Checkpoint::write_manifest(directory / "model.gguf"));
}

}  // namespace
}  // namespace conclave::testing
