// Conversions as an application asks for them: their defaults, what stops them, and what they
// leave.
#include "io/io_test_support.h"

#include "conclave/checkpoint.h"
#include "conclave/context.h"
#include "conclave/convert.h"
#include "conclave/error.h"
#include "conclave/synthetic.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <stdexcept>
#include <string>

namespace conclave {
namespace {

namespace fs = std::filesystem;
using testing::TemporaryDirectory;

constexpr const char* kModel = "testdata/mixtral-tiny";

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::map<std::string, std::string> files_of(const fs::path& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(directory)) {
    files[entry.path().filename().string()] = contents(entry.path());
  }
  return files;
}

class ConvertModel : public ::testing::Test {
 protected:
  ConversionRequest request(const std::string& name = "out") const {
    return {.source = kModel,
            .destination = scratch_.path() / name,
            .format = "int8-channel",
            .shard_bytes = 30'000,
            .tokens = 0};
  }
  Error error_of(const ConversionRequest& request) const {
    try {
      convert_model(context_, request);
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << "the conversion succeeded";
    return {ErrorCode::kInternal, ErrorDetail{}};
  }
  bool is_empty() const { return fs::is_empty(scratch_.path()); }

  TemporaryDirectory scratch_;
  Context context_{ContextOptions{.num_threads = 2}};
};

TEST_F(ConvertModel, Defaults_AreAllLayersAndComparedOutputs) {
  ConversionRequest asked = request();
  asked.tokens = 8;
  const ConversionReport report = convert_model(context_, asked);
  const Checkpoint source = Checkpoint::open(kModel);
  ASSERT_EQ(report.layers.size(), source.layers().size());
  for (const ConvertedLayer& layer : report.layers) {
    EXPECT_EQ(layer.tokens.size(), 8U);
    EXPECT_GT(layer.worst, 0);
    EXPECT_LT(layer.worst, 0.1);
    EXPECT_LE(layer.median, layer.worst);
  }
  EXPECT_EQ(Checkpoint::open(report.model).layers().size(), source.layers().size());
  EXPECT_EQ(report.model, asked.destination);
  const auto json = nlohmann::json::parse(contents(asked.destination / "conversion.json"));
  EXPECT_EQ(json, nlohmann::json::parse(to_json(report)));
  EXPECT_EQ(json.at("matrices").size(), report.matrices.size());
  EXPECT_EQ(json.at("layers").size(), report.layers.size());
}

TEST_F(ConvertModel, LayersInAnyOrderAndTwice_AreEachConvertedOnce) {
  ConversionRequest asked = request();
  asked.layers = {1, 0, 1};
  const ConversionReport report = convert_model(context_, asked);
  std::set<std::string> names;
  for (const ConvertedMatrix& matrix : report.matrices) {
    EXPECT_TRUE(names.insert(matrix.name).second) << matrix.name;
  }
}

TEST_F(ConvertModel, AGgufResult_SaysWhereItsFileIs) {
  ConversionRequest asked = request("model.gguf");
  asked.source = "testdata/gguf/llama-split/model-00001-of-00003.gguf";
  asked.format = "q4_0";
  asked.shard_bytes = 5'000'000'000;
  EXPECT_EQ(container_of_result(asked), ModelContainer::kGguf);
  const ConversionReport report = convert_model(context_, asked);
  EXPECT_EQ(report.model.parent_path(), asked.destination);
  EXPECT_FALSE(Checkpoint::open(report.model).layers().empty());
}

TEST_F(ConvertModel, BadRequests_NameTheFieldAndLeaveNothing) {
  struct Case {
    std::function<void(ConversionRequest&)> change;
    ErrorCode code;
    std::string field;
    std::string found;
  };
  const Case cases[] = {
      {[](auto& r) { r.format = "int3"; }, ErrorCode::kUnknownName, "format", "'int3'"},
      {[](auto& r) { r.format = ""; }, ErrorCode::kUnknownName, "format", "''"},
      {[](auto& r) { r.format = "int8-channel:x"; }, ErrorCode::kInvalidArgument, "format", "'x'"},
      {[](auto& r) { r.container = ModelContainer::kGguf; }, ErrorCode::kUnknownName, "format",
       "'int8-channel'"},
      {[](auto& r) { r.keep = {{.pattern = "*"}}; }, ErrorCode::kInvalidArgument, "", ""},
      {[](auto& r) { r.keep = {{.pattern = "nothing"}}; }, ErrorCode::kInvalidArgument, "keep",
       "nothing"},
      {[](auto& r) { r.keep = {{.pattern = ""}}; }, ErrorCode::kInvalidArgument, "keep", ""},
      {[](auto& r) { r.keep = {{.pattern = "*", .format = "q4_k"}}; }, ErrorCode::kUnknownName,
       "keep", "'q4_k'"},
      {[](auto& r) { r.layers = {7}; }, ErrorCode::kLayerNotFound, "", ""},
      {[](auto& r) { r.layers = {-1}; }, ErrorCode::kLayerNotFound, "", ""},
      {[](auto& r) { r.shard_bytes = 0; }, ErrorCode::kInvalidArgument, "shard_bytes", "0"},
      {[](auto& r) { r.tokens = -1; }, ErrorCode::kInvalidArgument, "tokens", "-1"},
      {[](auto& r) { r.destination = ""; }, ErrorCode::kInvalidArgument, "destination", ""},
      {[](auto& r) { r.source = ""; }, ErrorCode::kInvalidArgument, "source", ""},
      {[](auto& r) { r.source = "testdata/no-such-model"; }, ErrorCode::kFileNotFound, "", ""},
  };
  for (const Case& wrong : cases) {
    ConversionRequest asked = request();
    asked.unfinished = UnfinishedModel::kRemove;
    wrong.change(asked);
    const Error error = error_of(asked);
    EXPECT_EQ(error.code(), wrong.code) << error.what();
    if (!wrong.field.empty()) {
      EXPECT_EQ(error.detail().tensor, wrong.field) << error.what();
    }
    if (!wrong.found.empty()) {
      EXPECT_EQ(error.detail().found, wrong.found) << error.what();
    }
    EXPECT_TRUE(is_empty()) << error.what();
  }
}

// What the caller throws ends the conversion at any of its steps.
TEST_F(ConvertModel, Stopped_LeavesNothingUnlessAsked) {
  struct Stop : std::runtime_error {
    Stop() : std::runtime_error("stop") {}
  };
  ConversionRequest asked = request("a/b/out");
  asked.tokens = 2;
  int calls = 0;
  asked.progress = [&](std::string_view, int64_t, int64_t) { ++calls; };
  convert_model(context_, asked);
  fs::remove_all(scratch_.path() / "a");
  ASSERT_GT(calls, 4);
  for (const int last : {1, calls / 2, calls - 1, calls}) {
    SCOPED_TRACE(last);
    int told = 0;
    asked.progress = [&](std::string_view, int64_t done, int64_t total) {
      EXPECT_LE(done, total);
      if (++told == last) throw Stop();
    };
    asked.unfinished = UnfinishedModel::kRemove;
    EXPECT_THROW(convert_model(context_, asked), Stop);
    EXPECT_EQ(told, last);
    EXPECT_TRUE(is_empty()) << "with the parents that were made for it";
  }
  int told = 0;
  asked.progress = [&](std::string_view, int64_t, int64_t) {
    if (++told == calls) throw Stop();
  };
  asked.unfinished = UnfinishedModel::kKeep;
  EXPECT_THROW(convert_model(context_, asked), Stop);
  EXPECT_FALSE(fs::exists(asked.destination));
  // An earlier conversion's work is not this one's to remove.
  asked.unfinished = UnfinishedModel::kRemove;
  told = calls - 1;
  EXPECT_THROW(convert_model(context_, asked), Stop);
  EXPECT_TRUE(fs::exists(asked.destination.string() + ".partial"));
  asked.progress = nullptr;
  EXPECT_GT(convert_model(context_, asked).shards_kept, 0U);
  EXPECT_FALSE(fs::exists(asked.destination.string() + ".partial"));
}

TEST_F(ConvertModel, WhatIsWrittenBeside_IsThereWithTheModel) {
  ConversionRequest asked = request();
  asked.writes_report = false;
  asked.complete = [&](const ConversionReport& report, const fs::path& directory) {
    EXPECT_FALSE(fs::exists(asked.destination));
    std::ofstream(directory / "note.txt") << report.matrices.size();
  };
  const ConversionReport report = convert_model(context_, asked);
  EXPECT_EQ(contents(asked.destination / "note.txt"), std::to_string(report.matrices.size()));
  EXPECT_FALSE(fs::exists(asked.destination / "conversion.json"));

  asked.destination = scratch_.path() / "second";
  asked.unfinished = UnfinishedModel::kRemove;
  asked.complete = [](const ConversionReport&, const fs::path&) { throw std::runtime_error("no"); };
  EXPECT_THROW(convert_model(context_, asked), std::runtime_error);
  EXPECT_FALSE(fs::exists(asked.destination));
  EXPECT_FALSE(fs::exists(asked.destination.string() + ".partial"));
}

TEST_F(ConvertModel, TheSourceAndWhatHoldsIt_AreNoDestination) {
  fs::copy(kModel, scratch_.path() / "model");
  const auto before = files_of(scratch_.path() / "model");
  for (const char* name : {"model", "model/", ".", "model/../model"}) {
    ConversionRequest asked = request();
    asked.source = scratch_.path() / "model";
    asked.destination = scratch_.path() / name;
    asked.existing = ExistingModel::kReplace;
    asked.unfinished = UnfinishedModel::kRemove;
    EXPECT_EQ(error_of(asked).code(), ErrorCode::kFileWrite) << name;
  }
  EXPECT_EQ(files_of(scratch_.path() / "model"), before);
}

TEST_F(ConvertModel, AnExistingDestination_StaysAsItIs) {
  fs::copy(kModel, scratch_.path() / "out");
  const auto before = files_of(scratch_.path() / "out");
  ConversionRequest asked = request();
  const Error refused = error_of(asked);
  EXPECT_EQ(refused.code(), ErrorCode::kFileWrite);
  EXPECT_EQ(refused.detail().file, asked.destination.string());
  EXPECT_EQ(files_of(scratch_.path() / "out"), before);
  // A replacement that fails has not touched it either.
  asked.existing = ExistingModel::kReplace;
  asked.unfinished = UnfinishedModel::kRemove;
  asked.progress = [](std::string_view, int64_t, int64_t) { throw std::runtime_error("stop"); };
  EXPECT_THROW(convert_model(context_, asked), std::runtime_error);
  EXPECT_EQ(files_of(scratch_.path() / "out"), before);
  EXPECT_FALSE(fs::exists(asked.destination.string() + ".partial"));
}

TEST_F(ConvertModel, ADamagedSource_IsNamedAndLeavesNothing) {
  fs::copy(kModel, scratch_.path() / "model");
  fs::resize_file(scratch_.path() / "model/model.safetensors",
                  fs::file_size(scratch_.path() / "model/model.safetensors") - 100);
  ConversionRequest asked = request();
  asked.source = scratch_.path() / "model";
  const Error error = error_of(asked);
  EXPECT_EQ(error.code(), ErrorCode::kSafetensorsTruncatedData) << error.what();
  EXPECT_NE(error.detail().file.find("model.safetensors"), std::string::npos);
  EXPECT_FALSE(fs::exists(asked.destination.string() + ".partial"));
}

// The rows of an application take the place of random ones, and are asked for before any writing.
class OwnRows final : public RowSource {
 public:
  explicit OwnRows(int64_t fails_at = -1) : fails_at_(fails_at) {}
  std::string name() const override { return "rows of a test"; }
  void check(int64_t layer, const MoeSpec&) const override {
    if (layer == fails_at_) throw Error(ErrorCode::kTensorMissing, {.what = "no rows"});
  }
  ComparedRows load(int64_t layer, const MoeSpec& spec) const override {
    return random_rows(spec, 3 + layer, 11);
  }

 private:
  int64_t fails_at_;
};

TEST_F(ConvertModel, OwnRows_AreCompared) {
  const OwnRows rows;
  ConversionRequest asked = request();
  asked.tokens = 1;
  asked.rows = &rows;
  const ConversionReport report = convert_model(context_, asked);
  ASSERT_EQ(report.layers.size(), 2U);
  EXPECT_EQ(report.layers[0].tokens.size(), 3U);
  EXPECT_EQ(report.layers[1].tokens.size(), 4U);
  EXPECT_EQ(report.tokens, 4);
  EXPECT_EQ(report.input, "rows of a test");

  const OwnRows missing(1);
  asked = request("second");
  asked.tokens = 1;
  asked.rows = &missing;
  asked.unfinished = UnfinishedModel::kRemove;
  EXPECT_EQ(error_of(asked).code(), ErrorCode::kTensorMissing);
  EXPECT_FALSE(fs::exists(asked.destination.string() + ".partial"));
}

TEST_F(ConvertModel, ValuesOfAGgufFile_AreRefused) {
  class NoValues final : public ModelValues {
   public:
    std::unique_ptr<WeightSource> layer_source(int64_t) const override { return nullptr; }
    void read(std::string_view, uint64_t, std::span<std::byte>) const override {}
  };
  const NoValues values;
  ConversionRequest asked = request();
  asked.source = "testdata/gguf/qwen3moe-q4_k_m/model.gguf";
  asked.values = &values;
  EXPECT_EQ(error_of(asked).detail().tensor, "values");
  EXPECT_TRUE(is_empty());
}

TEST(ConversionFormats, NamesAreOneForEachContainer) {
  std::set<std::pair<std::string, ModelContainer>> seen;
  for (const ConversionFormat& format : conversion_formats()) {
    EXPECT_TRUE(seen.emplace(format.name, format.container).second) << format.name;
  }
  EXPECT_TRUE(seen.contains({"mxfp4", ModelContainer::kGguf}));
  EXPECT_TRUE(seen.contains({"mxfp4", ModelContainer::kSafetensors}));
  EXPECT_TRUE(seen.contains({"bf16", ModelContainer::kSafetensors}));
  EXPECT_FALSE(seen.contains({"bf16", ModelContainer::kGguf}));
}

}  // namespace
}  // namespace conclave
