// Records in files: what is written is read back, and files that are none are refused by name.
#include "support/layer_fixture.h"

#include "conclave/routing_record.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <unistd.h>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;

class RecordFile : public ::testing::Test {
 protected:
  ~RecordFile() override { std::filesystem::remove(path_); }

  static RoutingRecord record() {
    return {.model = "some \"model\"",
            .model_type = "qwen3_moe",
            .layers = {{.layer = {.layer = 0, .num_ids = 5, .num_slots = 2, .spec_hash = 0xABC},
                        .tokens = {{1, 2}, {-3, int64_t{1} << 60}, {1, 2}},
                        .topk_ids = {0, 1, 4, -1, 2, 3},
                        .topk_weights = {0.5F, -0.0F, 1e-30F, 0, 0.25F, 0.75F},
                        .dropped_tokens = 9},
                       {.layer = {.layer = 12, .num_ids = 7, .num_slots = 3},
                        .tokens = {},
                        .topk_ids = {},
                        .topk_weights = {}}}};
  }

  const std::filesystem::path path_ =
      std::filesystem::temp_directory_path() /
      ("conclave-record-" + std::to_string(getpid()) + ".safetensors");
};

TEST_F(RecordFile, WhatIsWritten_IsReadBack) {
  const RoutingRecord written = record();
  written.write(path_);
  const RoutingRecord read = RoutingRecord::open(path_);
  EXPECT_EQ(read.model, written.model);
  EXPECT_EQ(read.model_type, written.model_type);
  ASSERT_EQ(read.layers.size(), 2U);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(read.layers[i].layer.layer, written.layers[i].layer.layer);
    EXPECT_EQ(read.layers[i].layer.num_ids, written.layers[i].layer.num_ids);
    EXPECT_EQ(read.layers[i].layer.num_slots, written.layers[i].layer.num_slots);
    EXPECT_EQ(read.layers[i].layer.spec_hash, written.layers[i].layer.spec_hash);
    EXPECT_EQ(read.layers[i].tokens, written.layers[i].tokens);
    EXPECT_EQ(read.layers[i].dropped_tokens, written.layers[i].dropped_tokens);
  }
  EXPECT_TRUE(compare_routing(written, read).equal()) << "bits, that of -0 too";
}

// A file like that of record(), with one thing changed.
struct Parts {
  std::map<std::string, std::string> metadata = {{"format", "conclave.routing_record"},
                                                 {"version", "1"},
                                                 {"layers.2.num_ids", "4"},
                                                 {"layers.2.spec_hash", "00ff"},
                                                 {"layers.2.dropped_tokens", "0"}};
  Tensor tokens{DType::kI64, {2, 2}};
  Tensor ids{DType::kI32, {2, 3}};
  Tensor weights{DType::kF32, {2, 3}};
  std::string prefix = "layers.2.";
  std::vector<std::string> names = {"tokens", "topk_ids", "topk_weights"};

  void write(const std::filesystem::path& path) {
    std::vector<NamedTensor> tensors;
    const std::vector<ConstTensorView> views = {tokens.view(), ids.view(), weights.view()};
    for (size_t i = 0; i < views.size(); ++i) {
      if (!names[i].empty()) tensors.push_back({prefix + names[i], views[i]});
    }
    save_safetensors(path, tensors, metadata);
  }
};

TEST_F(RecordFile, FilesThatAreNone_AreRefused) {
  const auto code = [&](const std::function<void(Parts&)>& change) {
    Parts parts;
    change(parts);
    parts.write(path_);
    return code_of([&] { RoutingRecord::open(path_); });
  };
  using enum ErrorCode;
  EXPECT_EQ(code([](Parts&) {}), ErrorCode{0});
  EXPECT_EQ(code([](Parts& p) { p.metadata.erase("format"); }), kConfigMissingKey);
  EXPECT_EQ(code([](Parts& p) { p.metadata["format"] = "conclave.routing_trace"; }), kConfigValue);
  EXPECT_EQ(code([](Parts& p) { p.metadata["version"] = "2"; }), kConfigValue);
  EXPECT_EQ(code([](Parts& p) { p.metadata["layers.2.num_ids"] = "4x"; }), kConfigValue);
  EXPECT_EQ(code([](Parts& p) { p.metadata["layers.2.num_ids"] = "0"; }), kConfigValue);
  EXPECT_EQ(code([](Parts& p) { p.metadata["layers.2.spec_hash"] = "xyz"; }), kConfigValue);
  EXPECT_EQ(code([](Parts& p) { p.metadata["layers.2.dropped_tokens"] = "-1"; }), kConfigValue);
  EXPECT_EQ(code([](Parts& p) { p.names[0] = ""; }), kTensorMissing);
  EXPECT_EQ(code([](Parts& p) { p.names[1] = ""; }), kTensorMissing);
  EXPECT_EQ(code([](Parts& p) { p.names[2] = "topk_weight"; }), kTensorUnexpected);
  EXPECT_EQ(code([](Parts& p) { p.prefix = "layers.02."; }), kTensorUnexpected);
  EXPECT_EQ(code([](Parts& p) { p.prefix = "layers.-2."; }), kTensorUnexpected);
  EXPECT_EQ(code([](Parts& p) { p.prefix = "layers.70000."; }), kTensorUnexpected);
  EXPECT_EQ(code([](Parts& p) { p.prefix = ""; }), kTensorUnexpected);
  EXPECT_EQ(code([](Parts& p) { p.tokens = Tensor(DType::kI64, {2, 3}); }), kTensorShape);
  EXPECT_EQ(code([](Parts& p) { p.tokens = Tensor(DType::kI32, {2, 2}); }), kTensorDType);
  EXPECT_EQ(code([](Parts& p) { p.weights = Tensor(DType::kF32, {2, 2}); }), kTensorShape);
  EXPECT_EQ(code([](Parts& p) { p.weights = Tensor(DType::kF64, {2, 3}); }), kTensorDType);
  EXPECT_EQ(code([](Parts& p) { p.ids = Tensor(DType::kI32, {6}); }), kTensorShape);
  EXPECT_EQ(code([](Parts& p) { p.ids.as<int32_t>()[4] = 4; }), kExpertId);
  EXPECT_EQ(code([](Parts& p) { p.ids.as<int32_t>()[4] = -2; }), kExpertId);
  EXPECT_EQ(code_of([] { RoutingRecord::open("/nowhere/at/all"); }), kFileNotFound);
}

TEST_F(RecordFile, RecordsThatCannotBe_AreNotWritten) {
  RoutingRecord twice = record();
  twice.layers[1].layer.layer = 0;
  EXPECT_EQ(code_of([&] { twice.write(path_); }), ErrorCode::kInvalidArgument);
  RoutingRecord lengths = record();
  lengths.layers[0].topk_weights.pop_back();
  EXPECT_EQ(code_of([&] { lengths.write(path_); }), ErrorCode::kShape);
  EXPECT_FALSE(std::filesystem::exists(path_));
}

}  // namespace
}  // namespace conclave
