// Layers of GGUF blocks in memory, against the layer of the file that the blocks are from.
#include "conclave/gguf_blocks.h"

#include "spec/layer_weights.h"

#include "conclave/checkpoint.h"
#include "conclave/error.h"
#include "conclave/gguf.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace conclave {
namespace {

const std::filesystem::path kModel = "testdata/gguf/qwen3moe-q4_k_m/model.gguf";

struct Stored {
  std::string type;
  std::vector<std::byte> bytes;
};

// The tensors of the layer, by the weights that they hold.
std::map<std::string, Stored> stored_weights() {
  const std::map<std::string, std::string> names = {{"blk.0.ffn_gate_inp.weight", "router"},
                                                    {"blk.0.ffn_gate_exps.weight", "gate"},
                                                    {"blk.0.ffn_up_exps.weight", "up"},
                                                    {"blk.0.ffn_down_exps.weight", "down"}};
  const GgufReader file = GgufReader::open(kModel);
  std::map<std::string, Stored> found;
  for (const auto& [tensor, weight] : names) {
    const GgufTensorInfo& info = *file.find(tensor);
    Stored stored{.type = std::string(info.type), .bytes = std::vector<std::byte>(info.bytes)};
    file.read(info, 0, stored.bytes);
    found.emplace(weight, std::move(stored));
  }
  return found;
}

MoeSpec without_codes(MoeSpec spec) {
  spec.weight_dtype = DType::kF32;
  spec.quant = {};
  return spec;
}

class GgufBlocksOfAFile : public ::testing::Test {
 protected:
  void put_all() {
    for (const WeightShape& shape : layer_weights(without_codes(spec_))) {
      const Stored& stored = weights_.at(to_string(shape.id));
      const size_t bytes = stored.bytes.size() / static_cast<size_t>(shape.count);
      for (int64_t expert = 0; expert < shape.count; ++expert) {
        blocks_.put(shape.id, expert, stored.type,
                    std::span(stored.bytes).subspan(static_cast<size_t>(expert) * bytes, bytes));
      }
    }
  }

  // The code of the error, and its text.
  template <class Call>
  std::pair<ErrorCode, std::string> refusal(const Call& call) {
    try {
      call();
    } catch (const Error& error) {
      return {error.code(), error.what()};
    }
    return {};
  }

  Checkpoint checkpoint_ = Checkpoint::open(kModel);
  MoeSpec spec_ = checkpoint_.layer(0).spec;
  std::map<std::string, Stored> weights_ = stored_weights();
  GgufBlocks blocks_{without_codes(spec_)};
};

TEST_F(GgufBlocksOfAFile, AllPut_HasTheBytesOfItsLayer) {
  put_all();
  EXPECT_EQ(blocks_.spec().weight_dtype, spec_.weight_dtype);
  EXPECT_EQ(blocks_.spec().quant, spec_.quant);
  const auto expected = checkpoint_.layer_source(0);
  const auto source = blocks_.source();
  size_t planes = 0;
  for (const WeightShape& shape : layer_weights(spec_)) {
    const WeightInfo info = source->describe(shape.id);
    ASSERT_EQ(info.dtype, expected->describe(shape.id).dtype) << to_string(shape.id);
    ASSERT_EQ(info.count, shape.count);
    for (int64_t expert = 0; expert < info.count; ++expert) {
      const WeightBlock whole{.row_end = info.rows, .col_end = info.cols};
      const auto bytes = static_cast<size_t>(info.rows * info.cols * bit_size(info.dtype) / 8);
      std::vector<std::byte> found(bytes);
      std::vector<std::byte> wanted(bytes);
      source->read(shape.id, expert, whole, found);
      expected->read(shape.id, expert, whole, wanted);
      EXPECT_EQ(found, wanted) << source->locate(shape.id, expert);
      ++planes;
    }
  }
  EXPECT_EQ(planes, static_cast<size_t>(1 + 9 * spec_.num_experts));  // codes, scales, offsets
}

TEST_F(GgufBlocksOfAFile, OneMissing_IsNamed) {
  const auto [code, text] = refusal([&] { blocks_.source(); });
  EXPECT_EQ(code, ErrorCode::kTensorMissing);
  EXPECT_NE(text.find("gate[0]"), std::string::npos) << text;
  EXPECT_EQ(refusal([&] { blocks_.spec(); }).first, ErrorCode::kTensorMissing);
}

TEST_F(GgufBlocksOfAFile, WhatDoesNotFit_IsRefusedByName) {
  const std::span<const std::byte> bytes = weights_.at("down").bytes;
  const auto put = [&](WeightId id, int64_t expert, const char* type, size_t count) {
    return refusal([&] { blocks_.put(id, expert, type, bytes.first(count)); });
  };
  const size_t size =
      gguf_row_bytes("Q6_K", spec_.intermediate_size) * static_cast<size_t>(spec_.hidden_size);
  EXPECT_EQ(put(weights::kDown, 0, "Q6_K", size - 1).first, ErrorCode::kShape);
  EXPECT_EQ(put(weights::kDown, spec_.num_experts, "Q6_K", size).first,
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(put(weights::kDown, -1, "Q6_K", size).first, ErrorCode::kInvalidArgument);
  EXPECT_EQ(put(weights::kOutputBias, 0, "F32", size).first, ErrorCode::kInvalidArgument);
  EXPECT_EQ(put(weights::kDown, 1, "I8", size).first, ErrorCode::kTensorDType);
  EXPECT_EQ(put(weights::kDown, 1, "Q4_9", size).first, ErrorCode::kTensorDType);
  EXPECT_NE(put(weights::kDown, 1, "Q4_9", size).second.find("down[1]"), std::string::npos);
  EXPECT_EQ(refusal([&] { GgufBlocks of_codes(spec_); }).first,
            ErrorCode::kUnsupportedQuantization);
}

}  // namespace
}  // namespace conclave
