// Tuning tables: what is written can be read, entries serve up to their tokens, bad texts have
// codes.

#include "conclave/error.h"
#include "conclave/tuning.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace conclave {
namespace {

TuningEntry entry(int64_t tokens, const char* kernel = "cuda.stream_sm90") {
  return {.key = {.device = "NVIDIA H200",
                  .format = "bf16",
                  .num_experts = 128,
                  .hidden_size = 2048,
                  .intermediate_size = 768,
                  .top_k = 8},
          .tokens = tokens,
          .kernel = kernel,
          .tile = "16x128x128B, 6 stages",
          .microseconds = 71.5};
}

ErrorCode code_of_text(const std::string& text) {
  try {
    static_cast<void>(TuningTable::parse(text));
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode{0};
}

TEST(TuningTable, Text_ReadsBackAsItWasWritten) {
  TuningTable table;
  table.set(entry(64));
  table.set(entry(16));
  table.set(entry(64, "cuda.tile_sm90"));
  const TuningTable again = TuningTable::parse("# a comment\n\n" + table.to_text());
  EXPECT_EQ(again.to_text(), table.to_text());
  ASSERT_EQ(again.entries().size(), 2U);
  EXPECT_EQ(again.entries()[0].tokens, 16);
  EXPECT_EQ(again.entries()[1].kernel, "cuda.tile_sm90");
  EXPECT_EQ(again.entries()[1].tile, "16x128x128B, 6 stages");
  EXPECT_DOUBLE_EQ(again.entries()[1].microseconds, 71.5);
}

TEST(TuningTable, Find_TakesTheSmallestEntryThatReaches) {
  TuningTable table;
  table.set(entry(16));
  table.set(entry(64));
  const TuningKey key = entry(1).key;
  ASSERT_NE(table.find(key, 1), nullptr);
  EXPECT_EQ(table.find(key, 1)->tokens, 16);
  EXPECT_EQ(table.find(key, 16)->tokens, 16);
  EXPECT_EQ(table.find(key, 17)->tokens, 64);
  EXPECT_EQ(table.find(key, 65), nullptr);
  TuningKey other = key;
  other.top_k = 4;
  EXPECT_EQ(table.find(other, 1), nullptr);
}

TEST(TuningTable, BadTexts_HaveCodes) {
  const std::string good =
      "NVIDIA H200 | bf16 | E 128 H 2048 I 768 k 8 | T 64 | cuda.stream_sm90 | 16x128x128B | 71.5";
  const std::string heading = "conclave-tuning 1\n";
  EXPECT_EQ(code_of_text(heading + good), ErrorCode{0});
  EXPECT_EQ(code_of_text(""), ErrorCode::kTuningSyntax);
  EXPECT_EQ(code_of_text(good), ErrorCode::kTuningSyntax);
  EXPECT_EQ(code_of_text("conclave-tuning 2\n" + good), ErrorCode::kTuningVersion);
  EXPECT_EQ(code_of_text("conclave-tuning\n"), ErrorCode::kTuningSyntax);
  const char* const lines[] = {"NVIDIA H200",
                               "| bf16 | E 1 H 1 I 1 k 1 | T 1 | a | b | 1",
                               "d | bf16 | E 1 H 1 I 1 | T 1 | a | b | 1",
                               "d | bf16 | E 1 H 1 I 1 k 1 x | T 1 | a | b | 1",
                               "d | bf16 | E 1 H -1 I 1 k 1 | T 1 | a | b | 1",
                               "d | bf16 | E 1 H 99999999999999999999 I 1 k 1 | T 1 | a | b | 1",
                               "d | bf16 | E 1 H 1 I 1 k 1 | T 0 | a | b | 1",
                               "d | bf16 | E 1 H 1 I 1 k 1 | T 1 |  | b | 1",
                               "d | bf16 | E 1 H 1 I 1 k 1 | T 1 | a | b | fast",
                               "d | bf16 | E 1 H 1 I 1 k 1 | T 1 | a | b | 1 | 2"};
  for (const char* line : lines) {
    EXPECT_EQ(code_of_text(heading + line), ErrorCode::kTuningSyntax) << line;
  }
}

TEST(TuningTable, Load_NamesTheFile) {
  const std::filesystem::path path =
      std::filesystem::path(::testing::TempDir()) / "conclave_tuning_table_test.txt";
  {
    std::ofstream file(path);
    file << "conclave-tuning 1\nrubbish\n";
  }
  try {
    static_cast<void>(TuningTable::load(path));
    ADD_FAILURE() << "was read";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTuningSyntax);
    EXPECT_EQ(error.detail().file, path.string());
  }
  std::filesystem::remove(path);
  try {
    static_cast<void>(TuningTable::load(path));
    ADD_FAILURE() << "was read";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kFileNotFound);
  }
}

}  // namespace
}  // namespace conclave
