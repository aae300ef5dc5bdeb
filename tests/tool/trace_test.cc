// Traces of routing: files, their faults, and drawn ones.
#include "io/io_test_support.h"
#include "trace/record_trace.h"
#include "trace/synthetic_trace.h"
#include "trace/trace_file.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>

namespace conclave::tool {
namespace {

using testing::code_of;
using testing::name_of;

TraceInfo small_info() {
  return {.model = "m",
          .model_type = "mixtral",
          .num_experts = 4,
          .num_zero_experts = 1,
          .top_k = 2,
          .num_tokens = 3,
          .layers = {1, 5},
          .batch_begin = {0, 2}};
}

const std::vector<int32_t> kIds = {0, 3, 2, -1, 4, 1};

std::map<std::string, std::string> good_metadata() {
  return {{"format", "conclave.routing_trace"},
          {"version", "1"},
          {"num_experts", "4"},
          {"num_zero_experts", "1"},
          {"top_k", "2"},
          {"num_tokens", "3"},
          {"batches", "0,2"}};
}

std::filesystem::path write_file(const std::filesystem::path& path,
                                 const std::map<std::string, std::string>& metadata,
                                 const std::vector<int32_t>& ids,
                                 const std::string& name = "layers.1.topk_ids") {
  const NamedTensor tensor{name,
                           {ids.data(), DType::kI32, {static_cast<int64_t>(ids.size()) / 2, 2}}};
  save_safetensors(path, std::span(&tensor, 1), metadata);
  return path;
}

TEST(Trace, WrittenLayers_AreReadBack) {
  const testing::TemporaryDirectory directory;
  const std::filesystem::path path = directory.path() / "trace.safetensors";
  // A slot of a shared expert follows those that the router chose.
  const std::vector<int32_t> with_shared = {0, 3, 4, 2, -1, 4, 4, 1, 4};
  const std::vector<float> weights = {.5F, .5F, 1, .75F, .25F, 1, .1F, .9F, 1};
  TraceWriter writer(path, small_info(), TraceWeights::kYes);
  for (int layer = 0; layer < 2; ++layer) {
    writer.write({with_shared.data(), DType::kI32, {3, 3}}, {weights.data(), DType::kF32, {3, 3}});
  }
  writer.finish();

  const TraceFile trace = TraceFile::open(path);
  EXPECT_EQ(trace.info().layers, (std::vector<int64_t>{1, 5}));
  EXPECT_EQ(trace.info().batch_begin, (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(trace.info().model_type, "mixtral");
  EXPECT_EQ(trace.info().num_zero_experts, 1);
  EXPECT_EQ(trace.ids(0), kIds);
  EXPECT_EQ(trace.ids(1), kIds);
  const SafetensorsFile file = SafetensorsFile::open(path);
  const Tensor kept = file.load("layers.5.topk_weights");
  EXPECT_EQ(std::vector<float>(kept.as<float>(), kept.as<float>() + 6),
            (std::vector<float>{.5F, .5F, .75F, .25F, .1F, .9F}));
}

TEST(Trace, ExpertRows_LeaveOutZeroExpertsAndSkippedChoices) {
  EXPECT_EQ(expert_rows(kIds, 4), (std::vector<int64_t>{1, 1, 1, 1}));
}

struct BadMetadata {
  std::string key;
  std::string value;  // empty: the key is left out
  ErrorCode code;
};

TEST(Trace, BadMetadata_IsRefusedByKey) {
  const testing::TemporaryDirectory directory;
  const BadMetadata cases[] = {
      {"format", "", ErrorCode::kConfigMissingKey},
      {"format", "something", ErrorCode::kConfigValue},
      {"version", "2", ErrorCode::kConfigValue},
      {"num_experts", "", ErrorCode::kConfigMissingKey},
      {"num_experts", "nan", ErrorCode::kConfigValue},
      {"num_experts", "0", ErrorCode::kConfigValue},
      {"num_experts", "-4", ErrorCode::kConfigValue},
      {"num_experts", "4.0", ErrorCode::kConfigValue},
      {"num_experts", "99999999999999999999", ErrorCode::kConfigValue},
      {"num_zero_experts", "-1", ErrorCode::kConfigValue},
      {"top_k", "6", ErrorCode::kConfigValue},
      {"top_k", "0", ErrorCode::kConfigValue},
      {"num_tokens", "1e9", ErrorCode::kConfigValue},
      {"batches", "", ErrorCode::kConfigMissingKey},
      {"batches", "1", ErrorCode::kConfigValue},
      {"batches", "0,0", ErrorCode::kConfigValue},
      {"batches", "0,3", ErrorCode::kConfigValue},
      {"batches", "0,2,1", ErrorCode::kConfigValue},
      {"batches", "0,", ErrorCode::kConfigValue},
      {"top_k", "1", ErrorCode::kTensorShape},
      {"num_tokens", "4", ErrorCode::kTensorShape},
  };
  for (const BadMetadata& bad : cases) {
    std::map<std::string, std::string> metadata = good_metadata();
    metadata[bad.key] = bad.value;
    if (bad.value.empty()) metadata.erase(bad.key);
    const auto path = write_file(directory.path() / "bad.safetensors", metadata, kIds);
    std::string what;
    const auto code = code_of([&] { TraceFile::open(path); }, &what);
    EXPECT_EQ(name_of(code), to_string(bad.code)) << bad.key << "=" << bad.value;
    EXPECT_NE(what.find("bad.safetensors"), std::string::npos) << what;
    const std::string named = bad.code == ErrorCode::kTensorShape ? "topk_ids" : bad.key;
    EXPECT_NE(what.find(named), std::string::npos) << what;
  }
}

TEST(Trace, BadTensors_AreRefusedByName) {
  const testing::TemporaryDirectory directory;
  const std::filesystem::path path = directory.path() / "bad.safetensors";
  for (const std::string name :
       {"topk_ids", "layers.x.topk_ids", "layers.-1.topk_ids", "layers.01.topk_ids",
        "layers.70000.topk_ids", "layers..topk_ids"}) {
    write_file(path, good_metadata(), kIds, name);
    EXPECT_EQ(name_of(code_of([&] { TraceFile::open(path); })), "kTensorUnexpected") << name;
  }
  write_file(path, good_metadata(), kIds, "layers.1.topk_weights");
  EXPECT_EQ(name_of(code_of([&] { TraceFile::open(path); })), "kTensorDType");
  save_safetensors(path, {}, good_metadata());
  EXPECT_EQ(name_of(code_of([&] { TraceFile::open(path); })), "kTensorMissing");
  for (const int32_t wrong : {5, -2, INT32_MAX, INT32_MIN}) {
    std::vector<int32_t> ids = kIds;
    ids[3] = wrong;
    write_file(path, good_metadata(), ids);
    std::string what;
    const auto code = code_of([&] { TraceFile::open(path).ids(0); }, &what);
    EXPECT_EQ(name_of(code), "kExpertId");
    EXPECT_NE(what.find("token 1, choice 1"), std::string::npos) << what;
  }
  EXPECT_EQ(name_of(code_of([&] { TraceFile::open(directory.path() / "none"); })), "kFileNotFound");
}

TEST(Trace, WeightsThatAreNotFinite_NameTheToken) {
  const testing::TemporaryDirectory directory;
  const std::filesystem::path path = directory.path() / "nan.safetensors";
  for (const float wrong : {NAN, INFINITY}) {
    const std::vector<float> weights = {1, 1, 1, 1, wrong, 1};
    const NamedTensor tensors[] = {
        {"layers.1.topk_ids", {kIds.data(), DType::kI32, {3, 2}}},
        {"layers.1.topk_weights", {weights.data(), DType::kF32, {3, 2}}}};
    save_safetensors(path, tensors, good_metadata());
    std::string what;
    EXPECT_EQ(name_of(code_of([&] { TraceFile::open(path); }, &what)), "kTensorValue");
    EXPECT_NE(what.find("token 2, choice 0"), std::string::npos) << what;
  }
}

// Any damage ends in an error with a code, or in a trace that keeps its promises.
TEST(Trace, DamagedFiles_AreRefusedOrHonest) {
  const testing::TemporaryDirectory directory;
  const std::string good =
      testing::read_file(write_file(directory.path() / "good.safetensors", good_metadata(), kIds));
  std::mt19937 random(7);
  int refused = 0;
  for (int round = 0; round < 400; ++round) {
    std::string bytes = good;
    if (round % 3 == 0) bytes.resize(random() % bytes.size());
    for (unsigned change = 0; change <= random() % 3 && !bytes.empty(); ++change) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    const auto path = directory.write("damaged.safetensors", bytes);
    const auto code = code_of([&] {
      const TraceFile trace = TraceFile::open(path);
      const TraceInfo& info = trace.info();
      for (size_t i = 0; i < info.layers.size(); ++i) {
        const std::vector<int32_t> ids = trace.ids(i);
        EXPECT_EQ(static_cast<int64_t>(ids.size()), info.num_tokens * info.top_k);
        for (const int32_t id : ids) EXPECT_LT(id, info.num_experts + info.num_zero_experts);
      }
    });
    refused += code ? 1 : 0;
  }
  EXPECT_GT(refused, 250);
}

TEST(RecordTrace, LayersOfOtherSizes_AreRefused) {
  MoeSpec spec;
  spec.num_experts = 8;
  spec.top_k = 2;
  MoeSpec pruned = spec;
  pruned.num_experts = 6;
  const TracedLayer same[] = {{3, 10, spec}, {4, 10, spec}};
  EXPECT_EQ(trace_info("m", "t", same).layers, (std::vector<int64_t>{3, 4}));
  const TracedLayer other_experts[] = {{3, 10, spec}, {4, 10, pruned}};
  const TracedLayer other_tokens[] = {{3, 10, spec}, {4, 11, spec}};
  for (const auto& layers : {other_experts, other_tokens}) {
    std::string what;
    const auto code = code_of([&] { trace_info("m", "t", std::span(layers, 2)); }, &what);
    EXPECT_EQ(name_of(code), "kUnsupported");
    EXPECT_NE(what.find("layers 3 and 4"), std::string::npos) << what;
  }
}

SyntheticTrace drawn(const std::string& rule, int64_t tokens, double correlation = 0,
                     uint64_t seed = 1) {
  return SyntheticTrace(
      {.num_experts = 64, .top_k = 4, .num_tokens = tokens, .layers = {0, 1}},
      {.choice = parse_trace_choice(rule), .text = rule, .seed = seed, .correlation = correlation});
}

std::vector<int64_t> sorted_rows(const SyntheticTrace& trace, size_t layer = 0) {
  std::vector<int64_t> rows = expert_rows(trace.ids(layer), 64);
  std::ranges::sort(rows, std::ranges::greater());
  return rows;
}

TEST(SyntheticTrace, Tokens_ChooseDistinctExperts) {
  for (const std::string rule : {"uniform", "zipf", "zipf:10", "one", "hot:2:0.9", "hot:63:0.5"}) {
    const std::vector<int32_t> ids = drawn(rule, 500, 0.5).ids(1);
    ASSERT_EQ(ids.size(), 2000U);
    for (size_t at = 0; at < ids.size(); at += 4) {
      const std::set<int32_t> distinct(ids.begin() + static_cast<long>(at),
                                       ids.begin() + static_cast<long>(at) + 4);
      ASSERT_EQ(distinct.size(), 4U) << rule << ", token " << at / 4;
      ASSERT_GE(*distinct.begin(), 0);
      ASSERT_LT(*distinct.rbegin(), 64);
    }
  }
}

TEST(SyntheticTrace, Rules_HaveTheirShares) {
  constexpr int64_t kTokens = 20000;
  const std::vector<int64_t> even = sorted_rows(drawn("uniform", kTokens));
  EXPECT_LT(static_cast<double>(even.front()), 1.15 * static_cast<double>(even.back()));
  // The first choice of a token alone follows the rule; later ones cannot repeat it.
  const std::vector<int32_t> ids = drawn("zipf:1", kTokens).ids(0);
  std::map<int32_t, int64_t> first;
  for (size_t at = 0; at < ids.size(); at += 4) ++first[ids[at]];
  std::vector<int64_t> rows;
  for (const auto& [id, count] : first) rows.push_back(count);
  std::ranges::sort(rows, std::ranges::greater());
  double harmonic = 0;
  for (int rank = 1; rank <= 64; ++rank) harmonic += 1.0 / rank;
  EXPECT_NEAR(static_cast<double>(rows[0]) / static_cast<double>(kTokens), 1 / harmonic, 0.02);
  EXPECT_NEAR(static_cast<double>(rows[0]) / static_cast<double>(rows[1]), 2, 0.15);
  const std::vector<int64_t> hot = sorted_rows(drawn("hot:8:0.5", kTokens));
  int64_t share = 0;
  for (int i = 0; i < 8; ++i) share += hot[static_cast<size_t>(i)];
  EXPECT_NEAR(static_cast<double>(share) / (4.0 * kTokens), 0.5, 0.01);
  EXPECT_EQ(sorted_rows(drawn("one", 100))[3], 100);
  EXPECT_EQ(sorted_rows(drawn("one", 100))[4], 0);
}

TEST(SyntheticTrace, Correlation_RepeatsChoices) {
  const auto repeated = [](double correlation) {
    const std::vector<int32_t> ids = drawn("uniform", 5000, correlation).ids(0);
    int64_t same = 0;
    for (size_t at = 4; at < ids.size(); ++at) same += ids[at] == ids[at - 4] ? 1 : 0;
    return static_cast<double>(same) / static_cast<double>(ids.size());
  };
  EXPECT_LT(repeated(0), 0.03);
  EXPECT_NEAR(repeated(0.7), 0.7, 0.05);
}

TEST(SyntheticTrace, Seeds_DecideAlone) {
  EXPECT_EQ(drawn("zipf:1", 200).ids(0), drawn("zipf:1", 200).ids(0));
  EXPECT_NE(drawn("zipf:1", 200).ids(0), drawn("zipf:1", 200, 0, 2).ids(0));
  EXPECT_NE(drawn("zipf:1", 200).ids(0), drawn("zipf:1", 200).ids(1)) << "layers are alike";
}

TEST(SyntheticTrace, WrongRules_NameTheOption) {
  for (const std::string rule :
       {"", "gate", "zipf:", "zipf:-1", "zipf:11", "zipf:nan", "hot", "hot:8", "hot:0:0.5",
        "hot:1.5:0.5", "hot:8:1", "hot:8:0", "hot:8:nan", "hot:8:0.5:1", "uniform "}) {
    std::string what;
    EXPECT_EQ(name_of(code_of([&] { parse_trace_choice(rule); }, &what)), "kInvalidArgument")
        << rule;
    EXPECT_NE(what.find("--routing"), std::string::npos) << what;
  }
  EXPECT_EQ(name_of(code_of([] { drawn("hot:64:0.5", 10); })), "kInvalidArgument");
  EXPECT_EQ(name_of(code_of([] { drawn("uniform", 10, 1.0); })), "kInvalidArgument");
  EXPECT_EQ(name_of(code_of([] { drawn("uniform", int64_t{1} << 27); })), "kInvalidArgument");
  EXPECT_EQ(name_of(code_of([] { drawn("uniform", 10, NAN); })), "kInvalidArgument");
  EXPECT_EQ(name_of(code_of([] {
              SyntheticTrace({.num_experts = 2, .top_k = 3, .num_tokens = 1, .layers = {0}}, {});
            })),
            "kInvalidArgument");
}

}  // namespace
}  // namespace conclave::tool
