// GGUF files written and read again: tensors, keys, alignment, and what is refused.
#include "io_test_support.h"

#include "conclave/error.h"
#include "conclave/gguf.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;

std::vector<std::byte> counted_bytes(size_t count) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 7 + 1);
  return bytes;
}

std::vector<GgufKey> keys() {
  return {GgufKey::of_u32("general.alignment", 64), GgufKey::of_u16("some.u16", 7),
          GgufKey::of_i32("some.i32", -5),
          GgufKey::of_f32s("some.f32s", std::vector<float>{1.5F, -2.0F})};
}

std::vector<std::byte> read(const GgufReader& file, const char* name) {
  const GgufTensorInfo& info = *file.find(name);
  std::vector<std::byte> bytes(info.bytes);
  file.read(info, 0, bytes);
  return bytes;
}

void expect_error(ErrorCode code, const std::function<void()>& body) {
  std::string what;
  EXPECT_EQ(code_of(body, &what), code) << what;
}

TEST(GgufWriter, Tensors_ComeBackWithKeysAndShapes) {
  const TemporaryDirectory scratch;
  const fs::path path = scratch.path() / "model.gguf";
  const std::vector<std::byte> blocks = counted_bytes(3 * 2 * 36);
  const std::vector<std::byte> floats = counted_bytes(20);
  {
    GgufWriter writer(path, keys(), 64);
    writer.declare("a", "Q4_0", {3, 64});
    writer.declare("b", "F32", {5});
    writer.declare("c", "Q4_0", {1, 3, 64});
    writer.write(std::span(blocks).first(50));
    writer.write(std::span(blocks).subspan(50, 58));
    std::vector<std::byte> rest = floats;  // the end of one tensor and the next in one call
    rest.insert(rest.end(), blocks.begin(), blocks.begin() + 108);
    writer.write(rest);
    EXPECT_FALSE(fs::exists(path));
    writer.finish();
  }
  const GgufReader file = GgufReader::open(path);
  EXPECT_EQ(file.alignment(), 64U);
  ASSERT_EQ(file.tensors().size(), 3U);
  EXPECT_EQ(file.tensors()[2].shape, (std::vector<int64_t>{1, 3, 64}));
  EXPECT_EQ(file.tensors()[2].type, "Q4_0");
  EXPECT_EQ(read(file, "a"), std::vector(blocks.begin(), blocks.begin() + 108));
  EXPECT_EQ(read(file, "b"), floats);
  EXPECT_EQ(read(file, "c"), std::vector(blocks.begin(), blocks.begin() + 108));
  const std::vector<GgufKey> found = file.keys();
  ASSERT_EQ(found.size(), 4U);
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].name, keys()[i].name);
    EXPECT_EQ(found[i].value, keys()[i].value);
  }
}

// Every key of a bundled model, words of tokenizers among them, has the same bytes after a copy.
TEST(GgufWriter, CopiedModel_IsTheModel) {
  const TemporaryDirectory scratch;
  const GgufReader source = GgufReader::open("testdata/gguf/qwen3moe-q4_k_m/model.gguf");
  const fs::path path = scratch.path() / "copy.gguf";
  GgufWriter writer(path, source.keys(), source.alignment());
  for (const GgufTensorInfo& tensor : source.tensors()) {
    writer.declare(tensor.name, tensor.type, tensor.shape);
  }
  for (const GgufTensorInfo& tensor : source.tensors()) {
    std::vector<std::byte> bytes(tensor.bytes);
    source.read(tensor, 0, bytes);
    writer.write(bytes);
  }
  writer.finish();
  EXPECT_EQ(read_file(path), read_file("testdata/gguf/qwen3moe-q4_k_m/model.gguf"));
}

TEST(GgufWriter, OutlineWithoutData_HasTheSizeAndTheHeader) {
  const TemporaryDirectory scratch;
  const fs::path path = scratch.path() / "outline.gguf";
  GgufWriter writer(path, keys(), 64);
  writer.declare("a", "F32", {int64_t{1} << 20, 256});
  writer.finish_with_zeros();
  const GgufReader file = GgufReader::open(path);
  EXPECT_EQ(file.tensors()[0].bytes, uint64_t{1} << 30);
}

TEST(GgufWriter, WhatNoFileHolds_IsRefused) {
  const TemporaryDirectory scratch;
  const fs::path path = scratch.path() / "model.gguf";
  expect_error(ErrorCode::kGgufAlignment, [&] { GgufWriter(path, keys(), 48); });
  expect_error(ErrorCode::kGgufAlignment, [&] { GgufWriter(path, keys(), 4); });
  GgufWriter writer(path, keys(), 64);
  writer.declare("a", "Q4_0", {3, 64});
  expect_error(ErrorCode::kGgufDuplicateTensor, [&] { writer.declare("a", "F32", {1}); });
  expect_error(ErrorCode::kGgufName, [&] { writer.declare(std::string(65, 'x'), "F32", {1}); });
  for (const std::string& name :
       {std::string(), std::string("a\0", 2), std::string("a\n"), std::string("\xff")}) {
    expect_error(ErrorCode::kGgufName, [&] { writer.declare(name, "F32", {1}); });
  }
  expect_error(ErrorCode::kGgufTensorType, [&] { writer.declare("b", "F8", {1}); });
  expect_error(ErrorCode::kGgufShape, [&] { writer.declare("b", "Q4_0", {3, 48}); });
  expect_error(ErrorCode::kGgufShape, [&] { writer.declare("b", "F32", {1, 1, 1, 1, 1}); });
  expect_error(ErrorCode::kGgufShape, [&] { writer.declare("b", "F32", {0}); });
  expect_error(ErrorCode::kGgufSizeOverflow, [&] {
    writer.declare("b", "F32", {int64_t{1} << 31, int64_t{1} << 31});
  });
  expect_error(ErrorCode::kState, [&] { writer.finish(); });
  writer.write(counted_bytes(108));
  expect_error(ErrorCode::kInvalidArgument, [&] { writer.write(counted_bytes(1)); });
  expect_error(ErrorCode::kState, [&] { writer.declare("b", "F32", {1}); });
  writer.finish();
  expect_error(ErrorCode::kState, [&] { writer.finish(); });
  expect_error(ErrorCode::kState, [&] { writer.write(counted_bytes(1)); });
  EXPECT_EQ(gguf_row_bytes("Q8_0", 64), 68U);
  for (const int64_t elements : {33, 0, -32}) {
    expect_error(ErrorCode::kGgufShape, [&] { gguf_row_bytes("Q8_0", elements); });
  }
  expect_error(ErrorCode::kGgufTensorType, [] { gguf_row_bytes("Q9_9", 32); });
}

TEST(GgufWriter, FileThatIsNotFinished_IsRemoved) {
  const TemporaryDirectory scratch;
  {
    GgufWriter writer(scratch.path() / "model.gguf", keys(), 64);
    writer.declare("a", "Q4_0", {3, 64});
    writer.write(counted_bytes(10));
    EXPECT_FALSE(fs::is_empty(scratch.path()));
  }
  EXPECT_TRUE(fs::is_empty(scratch.path()));
}

TEST(GgufReader, PartAlone_IsReadWithoutTheOthers) {
  const fs::path directory = "testdata/gguf/llama-split";
  size_t tensors = 0;
  size_t parts = 0;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.path().extension() != ".gguf") continue;
    ++parts;
    tensors += GgufReader::open_part(entry.path()).tensors().size();
  }
  EXPECT_EQ(parts, 3U);
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.path().string().find("-00001-of-") == std::string::npos) continue;
    const GgufReader whole = GgufReader::open(entry.path());
    EXPECT_EQ(whole.tensors().size(), tensors);
    EXPECT_EQ(whole.paths().size(), 3U);
  }
}

}  // namespace
}  // namespace conclave::testing
