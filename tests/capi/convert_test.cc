// Conversions through the C interface: the bytes of C++, and every argument that is wrong.
#include "conclave/convert.h"

#include "capi/handles.h"
#include "io/io_test_support.h"

#include "conclave/context.h"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace conclave {
namespace {

namespace fs = std::filesystem;
using testing::expect_error;
using testing::last_error;
using testing::sized;
using testing::TemporaryDirectory;
using testing::text_by;

constexpr const char* kSmall = "testdata/mixtral-tiny";
constexpr const char* kForm = "int8-channel";
constexpr const char* kParts = "testdata/gguf/llama-split/model-00001-of-00003.gguf";

using Conversion = testing::Handle<conclave_conversion>;

std::map<std::string, std::string> files_of(const fs::path& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    std::ifstream file(entry.path(), std::ios::binary);
    if (!name.starts_with("conversion.")) files[name] = {std::istreambuf_iterator<char>(file), {}};
  }
  return files;
}

class Converting : public ::testing::Test {
 protected:
  std::string out(const char* name = "out") const { return (scratch_.path() / name).string(); }
  static conclave_convert_options without_comparison() {
    auto options = sized<conclave_convert_options>();
    options.flags = CONCLAVE_CONVERT_NO_COMPARISON;
    options.shard_bytes = 30'000;
    return options;
  }
  Conversion convert(const std::string& destination, const char* form,
                     const conclave_convert_options* options, const char* source = kSmall) const {
    conclave_conversion* made = nullptr;
    EXPECT_EQ(
        conclave_convert_model(context_.get(), source, destination.c_str(), form, options, &made),
        CONCLAVE_OK)
        << conclave_last_error_message();
    EXPECT_NE(made, nullptr);
    return Conversion(made);
  }
  void expect_refused(conclave_status status, const std::string& names,
                      const conclave_convert_options* options, const char* form = kForm,
                      const char* destination = nullptr, const char* source = kSmall) const {
    auto* const before = reinterpret_cast<conclave_conversion*>(0x40);
    conclave_conversion* made = before;
    const std::string to = destination == nullptr ? out() : destination;
    expect_error(conclave_convert_model(context_.get(), source, to.c_str(), form, options, &made),
                 status, names);
    EXPECT_EQ(made, before) << "results keep their values";
    EXPECT_TRUE(fs::is_empty(scratch_.path())) << names;
  }

  TemporaryDirectory scratch_;
  testing::Handle<conclave_context> context_ = testing::make_context();
};

TEST_F(Converting, WithoutOptions_HasTheBytesOfCpp) {
  const Conversion made = convert(out(), kForm, nullptr);
  const Context context(ContextOptions{.num_threads = 1});
  const ConversionReport expected =
      convert_model(context, {.source = kSmall, .destination = out("cpp"), .format = kForm});
  EXPECT_EQ(files_of(out()), files_of(out("cpp")));

  auto info = sized<conclave_conversion_info>();
  ASSERT_EQ(conclave_conversion_get_info(made.get(), &info), CONCLAVE_OK);
  EXPECT_EQ(info.model, out());
  EXPECT_STREQ(info.model_type, "mixtral");
  EXPECT_STREQ(info.incomplete, "");
  EXPECT_STREQ(info.no_tokenizer, "");
  EXPECT_EQ(info.bytes_before, expected.bytes_before);
  EXPECT_EQ(info.bytes_after, expected.bytes_after);
  EXPECT_EQ(info.shards, 1U);
  EXPECT_EQ(info.shards_kept, 0U);
  EXPECT_EQ(info.num_matrices, expected.matrices.size());
  EXPECT_EQ(info.num_layers, 2U);
  // A code of 8 bits rounds by at most half a step of 1/127 of its channel's largest value.
  EXPECT_GT(info.relative_error, 0);
  EXPECT_LT(info.relative_error, 0.5 / 127 * 4);
  EXPECT_GT(info.worst_error, 0);
  const auto json = nlohmann::json::parse(text_by(&conclave_conversion_json, made.get()));
  EXPECT_EQ(json.at("matrices").size(), info.num_matrices);
  EXPECT_EQ(json.at("tokens"), 32);

  // A program that knows the first members alone gets these.
  auto old = sized<conclave_conversion_info>();
  old.struct_size = offsetof(conclave_conversion_info, bytes_before);
  old.bytes_before = 7;
  ASSERT_EQ(conclave_conversion_get_info(made.get(), &old), CONCLAVE_OK);
  EXPECT_EQ(old.model, info.model);
  EXPECT_EQ(old.bytes_before, 7U);
}

TEST_F(Converting, TheResult_IsALayersSource) {
  const auto options = without_comparison();
  const Conversion made = convert(out(), kForm, &options);
  auto info = sized<conclave_conversion_info>();
  ASSERT_EQ(conclave_conversion_get_info(made.get(), &info), CONCLAVE_OK);
  EXPECT_EQ(info.num_layers, 0U);
  EXPECT_EQ(info.worst_error, 0);
  EXPECT_GT(info.shards, 1U);
  const auto model = testing::open_model(info.model);
  const auto layer =
      testing::make<conclave_layer>(&conclave_layer_create_from_checkpoint, context_.get(),
                                    model.get(), int64_t{0}, nullptr, nullptr);
  EXPECT_NE(layer, nullptr);
}

TEST_F(Converting, Options_AreThoseOfCpp) {
  auto options = sized<conclave_convert_options>();
  const char* const shared = "testdata/qwen2-moe-tiny";
  const int64_t layers[] = {2, 0};
  conclave_keep_rule rules[] = {sized<conclave_keep_rule>(), sized<conclave_keep_rule>()};
  rules[0].pattern = "*.layers.0.*";
  rules[1].pattern = "*.shared_expert.*";
  rules[1].format = "bf16";
  options.layers = layers;
  options.layers_count = 2;
  options.keep = rules;
  options.keep_count = 2;
  options.scales = CONCLAVE_SCALE_RULE_SEARCH;
  options.tokens = 3;
  options.seed = 5;
  const Conversion made = convert(out(), kForm, &options, shared);
  const Context context(ContextOptions{.num_threads = 1});
  const ConversionReport expected = convert_model(
      context,
      {.source = shared,
       .destination = out("cpp"),
       .format = kForm,
       .layers = {0, 2},
       .keep = {{.pattern = "*.layers.0.*"}, {.pattern = "*.shared_expert.*", .format = "bf16"}},
       .scales = ScaleRule::kSearch,
       .tokens = 3,
       .seed = 5});
  EXPECT_EQ(files_of(out()), files_of(out("cpp")));
  auto found = nlohmann::json::parse(text_by(&conclave_conversion_json, made.get()));
  auto same = nlohmann::json::parse(to_json(expected));
  found.erase("destination");
  same.erase("destination");
  EXPECT_EQ(found, same);
}

TEST_F(Converting, AGgufResult_IsOpenedByItsModel) {
  auto options = without_comparison();
  options.shard_bytes = 0;
  options.container = CONCLAVE_MODEL_CONTAINER_GGUF;
  const Conversion made = convert(out(), "q4_0", &options, kParts);
  auto info = sized<conclave_conversion_info>();
  ASSERT_EQ(conclave_conversion_get_info(made.get(), &info), CONCLAVE_OK);
  EXPECT_EQ(std::string(info.model), out() + "/model.gguf");
  EXPECT_NE(testing::open_model(info.model), nullptr);
}

TEST_F(Converting, WithoutAHandle_TheModelIsThere) {
  const auto options = without_comparison();
  EXPECT_EQ(conclave_convert_model(context_.get(), kSmall, out().c_str(), kForm, &options, nullptr),
            CONCLAVE_OK);
  EXPECT_TRUE(fs::exists(out() + "/config.json"));
}

TEST_F(Converting, NullPointers_AreNamed) {
  const std::string to = out();
  conclave_conversion* made = nullptr;
  const auto status = CONCLAVE_ERROR_NULL_POINTER;
  expect_error(conclave_convert_model(nullptr, kSmall, to.c_str(), kForm, nullptr, &made), status,
               "context");
  expect_error(conclave_convert_model(context_.get(), nullptr, to.c_str(), kForm, nullptr, &made),
               status, "source");
  expect_error(conclave_convert_model(context_.get(), kSmall, nullptr, kForm, nullptr, &made),
               status, "destination");
  expect_error(conclave_convert_model(context_.get(), kSmall, to.c_str(), nullptr, nullptr, &made),
               status, "format");
  EXPECT_EQ(made, nullptr);
  auto info = sized<conclave_conversion_info>();
  char* json = nullptr;
  expect_error(conclave_conversion_get_info(nullptr, &info), status, "conversion");
  expect_error(conclave_conversion_json(nullptr, &json), status, "conversion");
  expect_error(conclave_convert_formats_json(nullptr), status, "json");
  conclave_conversion_destroy(nullptr);
  const auto options = without_comparison();
  const Conversion done = convert(to, kForm, &options);
  expect_error(conclave_conversion_get_info(done.get(), nullptr), status, "info");
  expect_error(conclave_conversion_json(done.get(), nullptr), status, "json");
}

TEST_F(Converting, WrongOptions_AreNamedAndLeaveNothing) {
  const auto invalid = CONCLAVE_ERROR_INVALID_ARGUMENT;
  auto options = without_comparison();
  const auto refused = [&](conclave_status status, const std::string& names) {
    expect_refused(status, names, &options);
    options = without_comparison();
  };
  options.struct_size = 0;
  refused(invalid, "options");
  options.struct_size = sizeof options - 4;
  refused(invalid, "options");
  struct {
    conclave_convert_options known;
    uint64_t unknown;
  } newer = {without_comparison(), 1};
  newer.known.struct_size = sizeof newer;
  expect_refused(CONCLAVE_ERROR_UNSUPPORTED, "options", &newer.known);
  options.flags = 4;
  refused(invalid, "options.flags");
  options.container = 3;
  refused(invalid, "options.container");
  options.container = -1;
  refused(invalid, "options.container");
  options.existing = 2;
  refused(invalid, "options.existing");
  options.scales = 2;
  refused(invalid, "options.scales");
  options.tokens = -1;
  refused(invalid, "options.tokens");
  options.tokens = (int64_t{1} << 20) + 1;
  refused(invalid, "options.tokens");
  options.layers_count = 1;
  refused(CONCLAVE_ERROR_NULL_POINTER, "options.layers");
  options.layers_count = size_t{1} << 40;
  refused(invalid, "options.layers_count");
  options.keep_count = 1;
  refused(CONCLAVE_ERROR_NULL_POINTER, "options.keep");
  options.keep_count = size_t{1} << 40;
  refused(invalid, "options.keep_count");
  const int64_t no_layer = 2;
  options.layers = &no_layer;
  options.layers_count = 1;
  refused(CONCLAVE_ERROR_LAYER_NOT_FOUND, "2");

  conclave_keep_rule rules[] = {sized<conclave_keep_rule>(), sized<conclave_keep_rule>()};
  const auto refused_rules = [&](conclave_status status, const std::string& names) {
    options.keep = rules;
    options.keep_count = 2;
    refused(status, names);
    rules[0] = rules[1] = sized<conclave_keep_rule>();
    rules[0].pattern = rules[1].pattern = "*.w1";
  };
  refused_rules(CONCLAVE_ERROR_NULL_POINTER, "options.keep[0].pattern");
  rules[1].struct_size = 8;
  refused_rules(invalid, "options.keep[1]");
  rules[0].struct_size = 4;
  refused_rules(invalid, "options.keep[0]");
  rules[0].pattern = "";
  refused_rules(invalid, "keep");
  rules[1].format = "int4-group32";
  refused_rules(CONCLAVE_ERROR_UNKNOWN_NAME, "keep");
  rules[1].pattern = "*.nothing";
  refused_rules(invalid, "nothing");
}

TEST_F(Converting, WrongNames_SayWhatThereIs) {
  expect_refused(CONCLAVE_ERROR_UNKNOWN_NAME, "int4-group128", nullptr, "int3");
  expect_refused(CONCLAVE_ERROR_INVALID_ARGUMENT, "group", nullptr, "gptq-int4:groups=64");
  // A hint names what C calls the way out.
  auto options = sized<conclave_convert_options>();
  options.container = CONCLAVE_MODEL_CONTAINER_GGUF;
  expect_refused(CONCLAVE_ERROR_UNKNOWN_NAME, "CONCLAVE_MODEL_CONTAINER_SAFETENSORS", &options);
  expect_refused(CONCLAVE_ERROR_FILE_NOT_FOUND, "no-such-model", nullptr, kForm, nullptr,
                 "testdata/no-such-model");
  expect_refused(CONCLAVE_ERROR_INVALID_ARGUMENT, "destination", nullptr, kForm, "");
}

TEST_F(Converting, Destinations_AreNeverLost) {
  fs::copy(kSmall, out());
  const auto before = files_of(out());
  const auto refused = [&](const std::string& to, const char* source, const std::string& names) {
    auto options = without_comparison();
    expect_error(
        conclave_convert_model(context_.get(), source, to.c_str(), kForm, &options, nullptr),
        CONCLAVE_ERROR_FILE_WRITE, names);
    EXPECT_EQ(files_of(out()), before);
    EXPECT_FALSE(fs::exists(to + ".partial"));
  };
  refused(out(), kSmall, "CONCLAVE_EXISTING_MODEL_REPLACE");
  EXPECT_EQ(last_error().file, out());
  refused(out(), out().c_str(), "the model itself");
  refused(out() + "/", out().c_str(), "the model itself");
  refused(scratch_.path().string(), out().c_str(), "holds it");
  std::ofstream(scratch_.path() / "file") << "x";
  refused(out("file"), kSmall, "exists");
  refused(out("file") + "/below", kSmall, "file");

  auto options = without_comparison();
  options.existing = CONCLAVE_EXISTING_MODEL_REPLACE;
  expect_error(
      conclave_convert_model(context_.get(), kSmall, out("file").c_str(), kForm, &options, nullptr),
      CONCLAVE_ERROR_FILE_WRITE, "no model");
  EXPECT_EQ(conclave_convert_model(context_.get(), kSmall, out().c_str(), kForm, &options, nullptr),
            CONCLAVE_OK);
  EXPECT_NE(files_of(out()), before);
}

TEST_F(Converting, DamagedModels_AreNamed) {
  const fs::path model = scratch_.path() / "model";
  const auto refused = [&](conclave_status status, const std::string& names) {
    const auto options = without_comparison();
    expect_error(conclave_convert_model(context_.get(), model.c_str(), out().c_str(), kForm,
                                        &options, nullptr),
                 status, names);
    EXPECT_FALSE(fs::exists(out()));
    EXPECT_FALSE(fs::exists(out() + ".partial"));
    fs::remove_all(model);
    fs::copy(kSmall, model);
  };
  fs::create_directory(model);
  refused(CONCLAVE_ERROR_FILE_NOT_FOUND, "config.json");
  fs::resize_file(model / "model.safetensors", fs::file_size(model / "model.safetensors") - 1);
  refused(CONCLAVE_ERROR_SAFETENSORS_TRUNCATED_DATA, "model.safetensors");
  std::ofstream(model / "config.json") << "{";
  refused(CONCLAVE_ERROR_JSON_SYNTAX, "config.json");
  {
    // The last tensor's values become infinite or NaN, whatever its type.
    std::fstream file(model / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    const auto size = static_cast<std::streamoff>(fs::file_size(model / "model.safetensors"));
    uint64_t header = 0;
    file.read(reinterpret_cast<char*>(&header), sizeof header);
    const auto data = static_cast<std::streamoff>(8 + header);
    file.seekp(data);
    const std::string ones(static_cast<size_t>(size - data), '\xFF');
    file << ones;
  }
  refused(CONCLAVE_ERROR_TENSOR_VALUE, "experts");
}

// What a caller's function says ends the conversion, at its first and at its last word.
struct Watcher {
  int calls = 0;
  int last = 0;  // 0: all go on
  conclave_status status = CONCLAVE_ERROR_CANCELLED;
  const char* reason = nullptr;
  std::vector<std::string> phases = {};
};

conclave_status watch(void* user, conclave_convert_progress* progress) {
  Watcher& watcher = *static_cast<Watcher*>(user);
  EXPECT_EQ(progress->struct_size, sizeof(conclave_convert_progress));
  EXPECT_GE(progress->done, 0);
  EXPECT_LE(progress->done, progress->total);
  if (watcher.phases.empty() || watcher.phases.back() != progress->phase) {
    watcher.phases.emplace_back(progress->phase);
  }
  if (++watcher.calls != watcher.last) return CONCLAVE_OK;
  progress->reason = watcher.reason;
  return watcher.status;
}

TEST_F(Converting, ACallersFunction_SeesAndEndsIt) {
  auto options = sized<conclave_convert_options>();
  options.tokens = 2;
  options.shard_bytes = 30'000;
  options.progress = &watch;
  Watcher all;
  options.progress_user = &all;
  convert(out(), kForm, &options);
  EXPECT_EQ(all.phases, (std::vector<std::string>{"converting", "measuring"}));
  ASSERT_GT(all.calls, 4);
  fs::remove_all(out());

  for (const int last : {1, all.calls / 2, all.calls}) {
    SCOPED_TRACE(last);
    Watcher watcher{.last = last, .status = CONCLAVE_ERROR_COMM_ABORTED, .reason = "the user left"};
    options.progress_user = &watcher;
    expect_refused(CONCLAVE_ERROR_COMM_ABORTED, "the user left", &options);
    EXPECT_EQ(watcher.calls, last);
    EXPECT_STREQ(last_error().tensor, "options.progress");
  }
  for (const conclave_status no_status : {-1, 1, 100000}) {
    Watcher watcher{.last = 1, .status = no_status};
    options.progress_user = &watcher;
    expect_refused(CONCLAVE_ERROR_CANCELLED, std::to_string(no_status), &options);
  }

  options.flags = CONCLAVE_CONVERT_KEEP_UNFINISHED;
  Watcher late{.last = all.calls};
  options.progress_user = &late;
  EXPECT_EQ(conclave_convert_model(context_.get(), kSmall, out().c_str(), kForm, &options, nullptr),
            CONCLAVE_ERROR_CANCELLED);
  EXPECT_TRUE(fs::exists(out() + ".partial"));
  Watcher rest;
  options.progress_user = &rest;
  const Conversion made = convert(out(), kForm, &options);
  auto info = sized<conclave_conversion_info>();
  ASSERT_EQ(conclave_conversion_get_info(made.get(), &info), CONCLAVE_OK);
  EXPECT_EQ(info.shards_kept, info.shards);
  EXPECT_FALSE(fs::exists(out() + ".partial"));
}

TEST_F(Converting, Formats_AreThoseOfCpp) {
  const auto json = nlohmann::json::parse(text_by(&conclave_convert_formats_json));
  const std::vector<ConversionFormat> formats = conversion_formats();
  ASSERT_EQ(json.size(), formats.size());
  for (size_t i = 0; i < formats.size(); ++i) {
    EXPECT_EQ(json[i].at("name"), formats[i].name);
    EXPECT_EQ(json[i].at("options"), formats[i].options);
    EXPECT_EQ(json[i].at("container") == "gguf", formats[i].container == ModelContainer::kGguf);
  }
}

}  // namespace
}  // namespace conclave
