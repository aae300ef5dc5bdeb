// Codes of 3 bits in words as compressed-tensors packs them: over the ends of words since its
// version 0.17, ten to a word before. Sizes of a few columns fit both.
#include "tiny_model.h"

#include "conclave/checkpoint.h"
#include "conclave/error.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

using nlohmann::json;

enum class Packing : uint8_t { kAcross, kWhole };
constexpr int64_t kBits = 3;
constexpr int64_t kWordBits = 32;
constexpr int64_t kInWord = kWordBits / kBits;

int64_t words_of(int64_t cols, Packing packing) {
  return packing == Packing::kAcross ? (cols * kBits + kWordBits - 1) / kWordBits
                                     : (cols + kInWord - 1) / kInWord;
}

uint32_t code_at(int64_t row, int64_t col) {
  return static_cast<uint32_t>((row * 5 + col * 3 + col / 7) % 8);
}

void pack(TinyTensor& tensor, int64_t rows, int64_t cols, Packing packing) {
  std::vector<uint32_t> words(static_cast<size_t>(rows * words_of(cols, packing)));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      const int64_t bit = packing == Packing::kAcross
                              ? col * kBits
                              : col / kInWord * kWordBits + col % kInWord * kBits;
      const auto at = static_cast<size_t>(row * words_of(cols, packing) + bit / kWordBits);
      const uint64_t shifted = uint64_t{code_at(row, col)} << (bit % kWordBits);
      words[at] |= static_cast<uint32_t>(shifted);
      const auto rest = static_cast<uint32_t>(shifted >> kWordBits);
      if (rest != 0) words[at + 1] |= rest;
    }
  }
  std::memcpy(tensor.bytes.data(), words.data(), tensor.bytes.size());
}

struct PackedModel {
  int64_t hidden = 0;
  int64_t inner = 0;
  Packing gate_up = Packing::kAcross;
  Packing down = Packing::kAcross;
  std::string version = {};

  TinyModel make() const {
    TinyModel model = make_tiny_model({.hidden_size = hidden, .intermediate_size = inner});
    const json weights = {
        {"num_bits", kBits}, {"type", "int"}, {"symmetric", true}, {"strategy", "channel"}};
    model.config["quantization_config"] = {
        {"quant_method", "compressed-tensors"},
        {"format", "pack-quantized"},
        {"config_groups", {{"group_0", {{"weights", weights}}}}}};
    if (!version.empty()) model.config["quantization_config"]["version"] = version;
    for (const TinyTensor& tensor : std::vector<TinyTensor>(model.tensors)) {
      if (tensor.name.find(".experts.") == std::string::npos) continue;
      model.drop(tensor.name);
      const int64_t rows = tensor.shape[0];
      const int64_t cols = tensor.shape[1];
      const Packing packing = tensor.name.find("down_proj") == std::string::npos ? gate_up : down;
      pack(model.add(tensor.name + "_packed", DType::kI32, {rows, words_of(cols, packing)}), rows,
           cols, packing);
      TinyTensor& scale = model.add(tensor.name + "_scale", DType::kF32, {rows, 1});
      const float one = 1;
      for (size_t at = 0; at < scale.bytes.size(); at += sizeof(one)) {
        std::memcpy(scale.bytes.data() + at, &one, sizeof(one));
      }
    }
    return model;
  }
};

void expect_codes(const PackedModel& model) {
  const TempDir directory;
  write_single(model.make(), directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  const auto source = checkpoint.layer_source(0);
  for (const WeightId id : {weights::kUp, weights::kDown}) {
    const WeightInfo info = source->describe(id);
    std::vector<std::byte> codes(static_cast<size_t>(info.rows * info.cols / 2));
    source->read(id, 1, {0, info.rows, 0, info.cols}, codes);
    for (int64_t i = 0; i < info.rows * info.cols; ++i) {
      const auto pair = static_cast<uint32_t>(codes[static_cast<size_t>(i / 2)]);
      // Codes of 4 bits stand for themselves less 8, those of 3 bits for themselves less 4.
      ASSERT_EQ(pair >> (i % 2 * 4) & 15, code_at(i / info.cols, i % info.cols) + 4)
          << to_string(id) << " row " << i / info.cols << " column " << i % info.cols;
    }
  }
}

Error error_of(const PackedModel& model) {
  const TempDir directory;
  write_single(model.make(), directory.path());
  const auto error = open_error(directory.path());
  return error ? *error : Error(ErrorCode::kInternal, "no error");
}

TEST(CodeWords, ColumnsThatFitBothPackings_LieAsOtherMatricesOfTheLayer) {
  ASSERT_EQ(words_of(88, Packing::kAcross), words_of(88, Packing::kWhole));
  ASSERT_NE(words_of(72, Packing::kAcross), words_of(72, Packing::kWhole));
  for (const Packing packing : {Packing::kAcross, Packing::kWhole}) {
    expect_codes({.hidden = 88, .inner = 72, .gate_up = packing, .down = packing});
    expect_codes({.hidden = 72, .inner = 88, .gate_up = packing, .down = packing});
  }
}

TEST(CodeWords, NothingInTheLayerTells_TheVersionDoes) {
  PackedModel model{.hidden = 88, .inner = 88};
  for (const char* version : {"0.17.0", "0.20.1", "1.0"}) {
    model.version = version;
    expect_codes(model);
  }
  model.gate_up = model.down = Packing::kWhole;
  for (const char* version : {"0.15.0", "0.6.0.20260101"}) {
    model.version = version;
    expect_codes(model);
  }
}

TEST(CodeWords, NothingTells_IsRefusedAndNotGuessed) {
  for (const char* version : {"", "0.16.1.a20260601", "unknown", "0."}) {
    const Error error = error_of({.hidden = 88, .inner = 88, .version = version});
    EXPECT_EQ(error.code(), ErrorCode::kTensorShape) << error.what();
    EXPECT_TRUE(error.detail().tensor.ends_with("_packed")) << error.what();
    EXPECT_TRUE(error.detail().file.ends_with(".safetensors")) << error.what();
  }
}

TEST(CodeWords, TwoPackingsInALayer_AreRefused) {
  const Error error = error_of({.hidden = 72, .inner = 136, .down = Packing::kWhole});
  EXPECT_EQ(error.code(), ErrorCode::kTensorShape) << error.what();
  EXPECT_NE(std::string(error.what()).find("in two ways"), std::string::npos) << error.what();
}

TEST(CodeWords, OneWordOfEachRow_IsTheSameInBothPackings) {
  expect_codes({.hidden = 10, .inner = 10});
}

}  // namespace
}  // namespace conclave::testing
