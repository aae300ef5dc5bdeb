// The parts of a conversion: patterns, edits of config.json, and conversions that are ended and go
// on.
#include "convert/forms/catalog.h"
#include "convert/forms/target_form.h"
#include "convert/json_edit.h"
#include "convert/request.h"

#include "conclave/checkpoint.h"
#include "conclave/context.h"
#include "conclave/convert.h"
#include "conclave/error.h"
#include "conclave/methods.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace conclave::inline v0::conversion {
namespace {

namespace fs = std::filesystem;

TEST(KeepPattern, Star_StandsForAnyText) {
  EXPECT_TRUE(matches("*", ""));
  EXPECT_TRUE(matches("*.down_proj", "model.layers.0.mlp.experts.3.down_proj"));
  EXPECT_TRUE(matches("model.*.experts.?.*", "model.layers.0.mlp.experts.3.down_proj"));
  EXPECT_FALSE(matches("model.*.experts.?.*", "model.layers.0.mlp.experts.31.down_proj"));
  EXPECT_FALSE(matches("*.down_proj", "model.down_proj.bias"));
  EXPECT_FALSE(matches("", "a"));
  EXPECT_TRUE(matches("a*b*c", "a-b-b-c"));
  EXPECT_FALSE(matches("a*b*c", "a-c-b"));
}

TEST(KeepPattern, ManyStars_TakeNoLongTime) {
  EXPECT_FALSE(matches("*a*a*a*a*a*a*a*a*a*a*a*a*b", std::string(5000, 'a')));
}

FormPointer kept(const std::string& text, ModelContainer container = ModelContainer::kSafetensors) {
  return parse_kept_form(text, container, ScaleRule::kAmax);
}

TEST(KeptForm, Values_AreKeptAnywhereAndCodesInGgufAlone) {
  EXPECT_EQ(kept("bf16")->name(), "bf16");
  for (const char* wrong : {"", "int4-group32", "q8_0", "BF16", "source"}) {
    EXPECT_THROW(kept(wrong), Error) << wrong;
  }
  EXPECT_EQ(kept("q8_0", ModelContainer::kGguf)->name(), "q8_0");
  EXPECT_THROW(kept("int4-group32", ModelContainer::kGguf), Error);
}

FormPointer form_of(const std::string& text,
                    ModelContainer container = ModelContainer::kSafetensors) {
  return parse_form(text, container, container, ScaleRule::kAmax);
}

TEST(FormCatalog, Options_BelongToTheFormThatHasThem) {
  EXPECT_EQ(form_of("gptq-int4")->name(), "gptq-int4");
  EXPECT_EQ(form_of("gptq-int8:asym,group=64")->name(), "gptq-int8:group=64,asym");
  for (const char* wrong :
       {"gptq-int4:", "gptq-int4:group=0", "gptq-int4:group=", "gptq-int4:group=8x",
        "gptq-int4:sym=1", "gptq-int4:sym,sym", "gptq-int4:desc_act", "int8-channel:group=8",
        "int8-channel:", "bf16", "q8_0", ""}) {
    EXPECT_THROW(form_of(wrong), Error) << wrong;
  }
}

TEST(FormCatalog, OneName_MayStandForEachContainer) {
  EXPECT_TRUE(form_of("mxfp4")->file_type() == std::nullopt);
  EXPECT_TRUE(form_of("mxfp4", ModelContainer::kGguf)->file_type() == 38U);
  EXPECT_THROW(form_of("nvfp4", ModelContainer::kGguf), Error);
  const std::vector<ConversionFormat> formats = conversion_formats();
  EXPECT_EQ(std::ranges::count(formats, "mxfp4", &ConversionFormat::name), 2);
  EXPECT_EQ(only_container_of("mxfp4"), std::nullopt);
  EXPECT_EQ(only_container_of("q8_0"), ModelContainer::kGguf);
  EXPECT_EQ(only_container_of("gptq-int4:asym"), ModelContainer::kSafetensors);
}

TEST(FormCatalog, Values_AreAFormOfDirectoriesMadeOfGgufFiles) {
  const auto parse = [](ModelContainer source, ModelContainer result) {
    return parse_form("bf16", source, result, ScaleRule::kAmax);
  };
  EXPECT_EQ(only_container_of("bf16"), ModelContainer::kSafetensors);
  EXPECT_FALSE(parse(ModelContainer::kGguf, ModelContainer::kSafetensors)->has_codes());
  EXPECT_THROW(parse(ModelContainer::kGguf, ModelContainer::kGguf), Error);
  EXPECT_THROW(parse(ModelContainer::kSafetensors, ModelContainer::kSafetensors), Error);
}

TEST(FormCatalog, EveryMethodThatIsWritten_HasAForm) {
  std::vector<std::string> written = MethodWriter::methods();
  std::ranges::sort(written);
  EXPECT_EQ(form_methods(), written);
}

TEST(JsonEdit, OtherMembers_KeepTheirBytes) {
  const std::string config =
      "{\n  \"a\": [1.0, Infinity, \"}\\\"{\"],\n  \"b\" : {\"c\": 1e5}\n}\n";
  EXPECT_EQ(with_member(config, "q", "{}"),
            "{\n  \"a\": [1.0, Infinity, \"}\\\"{\"],\n  \"b\" : {\"c\": 1e5},\n  \"q\": {}\n}\n");
  EXPECT_EQ(member_text(config, "b"), "{\"c\": 1e5}");
  EXPECT_EQ(member_text(config, "c"), "");
}

TEST(JsonEdit, Member_IsTakenOutWithItsComma) {
  EXPECT_EQ(without_member("{\"a\": 1, \"b\": 2, \"c\": 3}", "a"), "{\"b\": 2, \"c\": 3}");
  EXPECT_EQ(without_member("{\"a\": 1, \"b\": 2, \"c\": 3}", "b"), "{\"a\": 1, \"c\": 3}");
  EXPECT_EQ(without_member("{\"a\": 1, \"b\": 2, \"c\": 3}", "c"), "{\"a\": 1, \"b\": 2}");
  EXPECT_EQ(without_member("{\"a\": 1}", "a"), "{}");
  EXPECT_EQ(without_member("{}", "a"), "{}");
  EXPECT_EQ(with_member("{}", "a", "1"), "{\"a\": 1}");
  EXPECT_EQ(with_member("{\"a\": 1, \"b\": 2}", "a", "3"), "{\"b\": 2,\"a\": 3}");
}

class Scratch {
 public:
  Scratch() {
    std::string name = (fs::temp_directory_path() / "conclave-convert-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = name;
  }
  ~Scratch() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  fs::path operator/(const char* name) const { return path_ / name; }

 private:
  fs::path path_;
};

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The report names the directory and what an earlier run did; all else must be equal.
std::map<std::string, std::string> model_files(const fs::path& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("conversion.")) continue;
    files[name] = contents(entry.path());
  }
  return files;
}

ConversionRequest small_request(const fs::path& destination) {
  return {.source = "testdata/mixtral-tiny",
          .destination = destination,
          .format = "fp8-block",
          .layers = {0, 1},
          .shard_bytes = 30'000,
          .tokens = 0};
}

// Ends the process as a power cut would, once so many bytes are written.
class Ending final : public LogSink {
 public:
  explicit Ending(int64_t bytes) : bytes_(bytes) {}
  void log(LogLevel, std::string_view) override {}
  void progress(std::string_view phase, int64_t done, int64_t) override {
    if (phase == "converting" && done >= bytes_) ::raise(SIGKILL);
  }

 private:
  int64_t bytes_;
};

// Runs a conversion in a process of its own that ends after `bytes`.
void convert_and_end(const ConversionRequest& request, int64_t bytes) {
  const pid_t child = ::fork();
  if (child == 0) {
    Ending ending(bytes);
    const Context context({.device = "cpu", .num_threads = 1, .log = &ending});
    convert_model(context, request);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status)) << status;
}

TEST(Conversion, EndedAtEveryShard_GoesOnToTheSameFiles) {
  const Scratch scratch;
  const ConversionRequest whole = small_request(scratch / "whole");
  const Context context({.device = "cpu", .num_threads = 2});
  const ConversionReport report = convert_model(context, whole);
  ASSERT_GT(report.shards, 4U);
  const auto expected = model_files(scratch / "whole");
  // A step below every shard's size meets each of them; the last end is that of the last byte.
  const auto total = static_cast<int64_t>(report.bytes_after);
  size_t kept = 0;
  for (int64_t step = 0; step * 20'000 < total + 20'000; ++step) {
    const int64_t bytes = std::min(total, step * 20'000 + 1);
    SCOPED_TRACE(bytes);
    const ConversionRequest request = small_request(scratch / "ended");
    convert_and_end(request, bytes);
    EXPECT_FALSE(fs::exists(request.destination));
    const ConversionReport again = convert_model(context, request);
    EXPECT_EQ(model_files(request.destination), expected);
    EXPECT_FALSE(fs::exists(request.destination.string() + ".partial"));
    EXPECT_GE(again.shards_kept, kept);
    kept = again.shards_kept;
    for (size_t i = 0; i < report.matrices.size(); ++i) {
      EXPECT_EQ(again.matrices[i].error.squared_error, report.matrices[i].error.squared_error);
    }
    fs::remove_all(request.destination);
  }
  EXPECT_EQ(kept, report.shards - 1);
}

TEST(Conversion, EndedThreeTimes_StillGoesOn) {
  const Scratch scratch;
  const ConversionRequest request = small_request(scratch / "out");
  for (const int64_t bytes : {40'000, 80'000, 120'000}) convert_and_end(request, bytes);
  const Context context({.device = "cpu", .num_threads = 1});
  EXPECT_GE(convert_model(context, request).shards_kept, 3U);
}

std::vector<int64_t> layers_of(const char* source) {
  std::vector<int64_t> layers;
  const Checkpoint model = Checkpoint::open(source);
  for (const CheckpointLayer& layer : model.layers()) layers.push_back(layer.index);
  return layers;
}

// The other ways in which forms are written do the same: gathered and turned round, in stacks, in
// GGUF files, and in those of the MoE layers of a directory.
TEST(Conversion, EndedInAnyForm_GoesOnToTheSameFiles) {
  const Scratch scratch;
  const Context context({.device = "cpu", .num_threads = 2});
  const auto expect_same = [&](const char* source, const char* form, ModelContainer container,
                               uint64_t shard_bytes) {
    SCOPED_TRACE(std::string(form) + " of " + source);
    ConversionRequest request = small_request(scratch / "out");
    request.source = source;
    request.format = form;
    request.container = container;
    request.layers = layers_of(source);
    request.shard_bytes = shard_bytes;
    const ConversionReport all = convert_model(context, request);
    ASSERT_GT(all.shards, 2U);
    const auto expected = model_files(request.destination);
    fs::remove_all(request.destination);
    size_t kept = 0;
    for (const uint64_t thirds : {1U, 2U, 3U}) {
      SCOPED_TRACE(thirds);
      convert_and_end(request, static_cast<int64_t>(all.bytes_after * thirds / 3));
      EXPECT_FALSE(fs::exists(request.destination));
      const ConversionReport rest = convert_model(context, request);
      EXPECT_GE(rest.shards_kept, kept);
      kept = rest.shards_kept;
      EXPECT_EQ(model_files(request.destination), expected);
      EXPECT_FALSE(fs::exists(request.destination.string() + ".partial"));
      fs::remove_all(request.destination);
    }
    EXPECT_EQ(kept, all.shards - 1) << "ended at the last byte";
  };
  const auto directory = ModelContainer::kSafetensors;
  expect_same("testdata/mixtral-tiny", "gptq-int4:group=8,asym", directory, 30'000);
  expect_same("testdata/quantised/gpt_oss-mxfp4-wide", "gpt-oss-mxfp4", directory, 10'000);
  expect_same("testdata/gguf/llama-split/model-00001-of-00003.gguf", "q4_0", ModelContainer::kGguf,
              10'000);
  expect_same("testdata/quantised/qwen3_moe-compressed-int4-group32", "q5_1", ModelContainer::kGguf,
              10'000);
  expect_same("testdata/gguf/qwen3moe-q4_k_m/model.gguf", "int8-channel", directory, 60'000);
}

TEST(Conversion, DamagedShardOfAnEndedRun_IsWrittenAgain) {
  const Scratch scratch;
  const Context context({.device = "cpu", .num_threads = 1});
  convert_model(context, small_request(scratch / "whole"));
  const ConversionRequest request = small_request(scratch / "out");
  convert_and_end(request, 100'000);
  size_t shards = 0;
  for (const auto& entry : fs::directory_iterator(request.destination.string() + ".partial")) {
    if (entry.path().extension() != ".safetensors") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const auto last = static_cast<char>(file.get() ^ 1);
    file.seekp(-1, std::ios::end);
    file.put(last);
    ++shards;
  }
  ASSERT_GT(shards, 1U);
  EXPECT_EQ(convert_model(context, request).shards_kept, 0U);
  EXPECT_EQ(model_files(request.destination), model_files(scratch / "whole"));
}

TEST(Conversion, JournalCutOffInALine_LosesThatShardAlone) {
  const Scratch scratch;
  const ConversionRequest request = small_request(scratch / "out");
  convert_and_end(request, 100'000);
  const fs::path journal = request.destination.string() + ".partial/conversion.journal";
  const std::string text = contents(journal);
  const auto lines = std::ranges::count(text, '\n');
  ASSERT_GT(lines, 2);
  fs::resize_file(journal, text.size() - 5);
  const Context context({.device = "cpu", .num_threads = 1});
  EXPECT_EQ(convert_model(context, request).shards_kept, static_cast<size_t>(lines - 2));
}

TEST(Conversion, JournalCutOffInItsFirstLine_BeginsAnew) {
  const Scratch scratch;
  const ConversionRequest request = small_request(scratch / "out");
  convert_and_end(request, 100'000);
  fs::resize_file(request.destination.string() + ".partial/conversion.journal", 20);
  const Context context({.device = "cpu", .num_threads = 1});
  EXPECT_EQ(convert_model(context, request).shards_kept, 0U);
}

TEST(Conversion, EndedForAnotherForm_IsInTheWayUnlessReplaced) {
  const Scratch scratch;
  ConversionRequest request = small_request(scratch / "out");
  convert_and_end(request, 100'000);
  request.format = "int8-channel";
  const Context context({.device = "cpu", .num_threads = 1});
  try {
    convert_model(context, request);
    ADD_FAILURE() << "the journal of another form was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kFileWrite);
    EXPECT_NE(error.detail().hint.find("ExistingModel::kReplace"), std::string::npos);
  }
  request.existing = ExistingModel::kReplace;
  EXPECT_EQ(convert_model(context, request).shards_kept, 0U);
  EXPECT_TRUE(fs::exists(request.destination / "config.json"));
}

TEST(Conversion, WritesThatFail_AreAnErrorAndNoModel) {
  const Scratch scratch;
  const ConversionRequest request = small_request(scratch / "out");
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{.rlim_cur = 20'000, .rlim_max = 20'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const Context context({.device = "cpu", .num_threads = 1});
    try {
      convert_model(context, request);
    } catch (const Error& error) {
      ::_exit(error.code() == ErrorCode::kFileWrite ? 42 : 1);
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 42);
  EXPECT_FALSE(fs::exists(request.destination));
}

// Changes the source in the middle of a conversion.
class Changing final : public LogSink {
 public:
  explicit Changing(fs::path file) : file_(std::move(file)) {}
  void log(LogLevel, std::string_view) override {}
  void progress(std::string_view, int64_t done, int64_t total) override {
    if (done * 2 < total) return;
    fs::last_write_time(file_, fs::last_write_time(file_) + std::chrono::seconds(5));
  }

 private:
  fs::path file_;
};

TEST(Conversion, SourceThatChangesMeanwhile_IsAnErrorAndNoModel) {
  const Scratch scratch;
  fs::copy("testdata/mixtral-tiny", scratch / "source");
  ConversionRequest request = small_request(scratch / "out");
  request.source = scratch / "source";
  Changing changing(scratch / "source/model.safetensors");
  const Context context({.device = "cpu", .num_threads = 1, .log = &changing});
  try {
    convert_model(context, request);
    ADD_FAILURE() << "the change was not seen";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kFileChanged);
  }
  EXPECT_FALSE(fs::exists(request.destination));
}

}  // namespace
}  // namespace conclave::inline v0::conversion
