// Recorded routing through the C interface: rings, files, and replays that give the same bits.
#include "capi/layers.h"

#include "conclave/routing_record.h"

#include <nlohmann/json.hpp>

#include <cstdio>
#include <filesystem>
#include <iterator>
#include <limits>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace conclave {
namespace {

using testing::Call;
using testing::expect_error;
using testing::Handle;
using testing::Layers;
using testing::make;
using testing::same_bits;
using testing::sized;
using testing::tensor_of;

class Records : public Layers {
 protected:
  Handle<conclave_recorder> recorder(const conclave_recorder_options* options = nullptr) {
    const int64_t layers[] = {0};
    const conclave_spec* const specs[] = {c_spec_.get()};
    return make<conclave_recorder>(&conclave_recorder_create, layers, specs, size_t{1}, options);
  }

  // Forwards `tokens` tokens and records them from position `first` on.
  Call record(conclave_recorder* to, int64_t tokens, int64_t first) {
    Call call(spec_, tokens);
    const conclave_forward_args args = call.args();
    EXPECT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK);
    std::vector<conclave_token_key> keys;
    for (int64_t i = 0; i < tokens; ++i) keys.push_back({7, first + i});
    EXPECT_EQ(
        conclave_recorder_record(to, 0, &call.views[3], &call.views[4], keys.data(), keys.size()),
        CONCLAVE_OK)
        << conclave_last_error_message();
    return call;
  }

  Handle<conclave_spec> c_spec_ = make<conclave_spec>(&conclave_layer_spec, layer_.get());
};

TEST_F(Records, AreReplayed_WithTheSameBits_FromAFileToo) {
  const std::string path = ::testing::TempDir() + "capi_record_test." + std::to_string(::getpid());
  auto options = sized<conclave_recorder_options>();
  options.capacity = 32;
  options.model = "tiny";
  options.model_type = "qwen";
  auto ring = recorder(&options);
  const Call first = record(ring.get(), 9, 100);
  ASSERT_EQ(conclave_recorder_write(ring.get(), path.c_str()), CONCLAVE_OK);
  const auto from_memory = make<conclave_replay>(&conclave_replay_from_recorder, ring.get());
  ring.reset();
  const auto from_file = make<conclave_replay>(&conclave_replay_open, path.c_str());
  std::remove(path.c_str());

  auto info = sized<conclave_replay_info>();
  ASSERT_EQ(conclave_replay_get_info(from_file.get(), &info), CONCLAVE_OK);
  EXPECT_STREQ(info.model, "tiny");
  EXPECT_STREQ(info.model_type, "qwen");
  EXPECT_EQ(info.num_layers, 1U);
  auto layer = sized<conclave_replay_layer>();
  ASSERT_EQ(conclave_replay_get_layer(from_file.get(), 0, &layer), CONCLAVE_OK);
  EXPECT_EQ(layer.num_tokens, 9);
  EXPECT_EQ(layer.num_slots, num_slots(spec_));
  EXPECT_EQ(layer.num_ids, spec_.num_experts);
  EXPECT_NE(layer.spec_hash, 0U);
  expect_error(conclave_replay_get_layer(from_file.get(), 1, &layer),
               CONCLAVE_ERROR_LAYER_NOT_FOUND, "position");
  EXPECT_NE(testing::text_by(&conclave_replay_compare_json, from_memory.get(), from_file.get(),
                             int64_t{4})
                .find("\"equal\": true"),
            std::string::npos);

  std::vector<conclave_token_key> keys;
  for (int64_t i = 0; i < 9; ++i) keys.push_back({7, 100 + i});
  Call again(spec_, 9);
  Tensor ids(DType::kI32, {9, num_slots(spec_)});
  Tensor weights(DType::kF32, {9, num_slots(spec_)});
  const conclave_tensor id_view = tensor_of(ids.const_view());
  const conclave_tensor weight_view = tensor_of(weights.const_view());
  ASSERT_EQ(
      conclave_replay_find(from_file.get(), 0, keys.data(), keys.size(), &id_view, &weight_view),
      CONCLAVE_OK)
      << conclave_last_error_message();
  conclave_forward_args args = again.args();
  args.captured_logits = nullptr;
  args.topk_ids = &id_view;
  args.topk_weights = &weight_view;
  ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
  EXPECT_TRUE(same_bits(again.out, first.out));
  EXPECT_TRUE(same_bits(again.ids, first.ids));

  keys[3].position = 5;
  weights.as<float>()[0] = 42;
  expect_error(
      conclave_replay_find(from_file.get(), 0, keys.data(), keys.size(), nullptr, &weight_view),
      CONCLAVE_ERROR_INVALID_ARGUMENT, "position 5");
  EXPECT_EQ(weights.as<float>()[0], 42);
  expect_error(conclave_replay_find(from_file.get(), 3, keys.data(), 1, nullptr, nullptr),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "layer");
  expect_error(conclave_replay_find(from_file.get(), 0, nullptr, 2, nullptr, nullptr),
               CONCLAVE_ERROR_NULL_POINTER, "tokens");
  expect_error(conclave_replay_find(from_file.get(), 0, keys.data(), ~size_t{0}, nullptr, nullptr),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "num_tokens");
  expect_error(conclave_replay_find(from_file.get(), 0, keys.data(), 2, &id_view, nullptr),
               CONCLAVE_ERROR_SHAPE, "topk_ids");
}

TEST_F(Records, TokensOfOneSideAlone_AreCountedThere) {
  const auto first = recorder();
  const auto second = recorder();
  record(first.get(), 3, 0);
  record(second.get(), 6, 2);
  const auto one = make<conclave_replay>(&conclave_replay_from_recorder, first.get());
  const auto other = make<conclave_replay>(&conclave_replay_from_recorder, second.get());
  const auto json = nlohmann::json::parse(
      testing::text_by(&conclave_replay_compare_json, one.get(), other.get(), int64_t{1}));
  const auto& layer = json["layers"][0];
  EXPECT_EQ(layer["compared"], 1);
  EXPECT_EQ(layer["only_in_first"], 2);
  EXPECT_EQ(layer["only_in_second"], 5);
  EXPECT_EQ(json["equal"], false);
}

TEST_F(Records, RowsThatWouldOverlap_AndNumbersBelowZero_AreRefused) {
  const auto ring = recorder();
  record(ring.get(), 3, 0);
  const auto replay = make<conclave_replay>(&conclave_replay_from_recorder, ring.get());
  const std::vector<conclave_token_key> keys = {{7, 0}, {7, 1}, {7, 2}};
  const int64_t slots = num_slots(spec_);
  // Rows that are apart, with the weights between them.
  std::vector<int32_t> memory(static_cast<size_t>(6 * slots + 1), 42);
  const conclave_tensor ids =
      tensor_of({memory.data(), DType::kI32, {3, slots}, /*row_stride=*/2 * slots});
  const auto find = [&](int64_t offset) {
    const conclave_tensor weights =
        tensor_of({memory.data() + offset, DType::kF32, {3, slots}, /*row_stride=*/2 * slots});
    return conclave_replay_find(replay.get(), 0, keys.data(), keys.size(), &ids, &weights);
  };
  for (const int64_t offset : {int64_t{0}, slots - 1, slots, 5 * slots - 1}) {
    expect_error(find(offset), CONCLAVE_ERROR_OVERLAP, "topk_weights");
  }
  EXPECT_EQ(memory, std::vector<int32_t>(memory.size(), 42));
  ASSERT_EQ(conclave_replay_find(replay.get(), 0, keys.data(), keys.size(), &ids, nullptr),
            CONCLAVE_OK)
      << conclave_last_error_message();
  EXPECT_EQ(memory[static_cast<size_t>(slots)], 42);
  EXPECT_NE(memory[static_cast<size_t>(4 * slots)], 42);

  char* json = nullptr;
  expect_error(conclave_replay_compare_json(replay.get(), replay.get(), -1, &json),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "most_examples");
  EXPECT_EQ(json, nullptr);
}

// A rename would take the place of a device as well.
TEST_F(Records, FilesThatAreNone_KeepTheirNames) {
  const auto ring = recorder();
  record(ring.get(), 3, 0);
  const std::string folder =
      ::testing::TempDir() + "capi_record_test.folder." + std::to_string(::getpid());
  const std::string pipe = folder + "/pipe";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directory(folder);
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& name : {folder, pipe}) {
    expect_error(conclave_recorder_write(ring.get(), name.c_str()), CONCLAVE_ERROR_FILE_WRITE,
                 name.c_str());
  }
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  const std::filesystem::directory_iterator files(folder);
  EXPECT_EQ(std::distance(begin(files), end(files)), 1);
  std::filesystem::remove_all(folder);
}

TEST_F(Records, FullRings_DoAsTheyWereTold) {
  for (const conclave_when_full when :
       {CONCLAVE_WHEN_FULL_DROP_OLDEST, CONCLAVE_WHEN_FULL_DROP_NEWEST}) {
    auto options = sized<conclave_recorder_options>();
    options.capacity = 4;
    options.when_full = when;
    const auto ring = recorder(&options);
    record(ring.get(), 6, 0);
    int64_t recorded = -1;
    int64_t dropped = -1;
    ASSERT_EQ(conclave_recorder_counts(ring.get(), 0, &recorded, &dropped), CONCLAVE_OK);
    EXPECT_EQ(recorded, 6);
    EXPECT_EQ(dropped, 2);
    ASSERT_EQ(conclave_recorder_clear(ring.get()), CONCLAVE_OK);
    ASSERT_EQ(conclave_recorder_counts(ring.get(), 0, &recorded, nullptr), CONCLAVE_OK);
    EXPECT_EQ(recorded, 0);
  }
  auto options = sized<conclave_recorder_options>();
  options.capacity = 4;
  options.when_full = CONCLAVE_WHEN_FULL_ERROR;
  const auto ring = recorder(&options);
  Call call(spec_, 6);
  const conclave_forward_args args = call.args();
  ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK);
  expect_error(conclave_recorder_record(ring.get(), 0, &call.views[3], &call.views[4], nullptr, 0),
               CONCLAVE_ERROR_STATE, "full");
}

TEST_F(Records, BadRecordings_AreTypedErrors_AndRecordNothing) {
  const auto ring = recorder();
  Call call(spec_, 3);
  const conclave_forward_args args = call.args();
  ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK);
  const conclave_tensor* const ids = &call.views[3];
  const conclave_tensor* const weights = &call.views[4];
  const std::vector<conclave_token_key> keys(3, {1, 2});
  const auto record = [&](int64_t layer, const conclave_tensor* a, const conclave_tensor* b,
                          const conclave_token_key* tokens, size_t count) {
    return conclave_recorder_record(ring.get(), layer, a, b, tokens, count);
  };
  expect_error(record(5, ids, weights, nullptr, 0), CONCLAVE_ERROR_INVALID_ARGUMENT, "layer");
  expect_error(record(0, weights, ids, nullptr, 0), CONCLAVE_ERROR_DTYPE, "topk_ids");
  expect_error(record(0, ids, &call.views[1], nullptr, 0), CONCLAVE_ERROR_SHAPE, "topk_weights");
  expect_error(record(0, ids, weights, keys.data(), 2), CONCLAVE_ERROR_SHAPE, "tokens");
  expect_error(record(0, ids, weights, keys.data(), 0), CONCLAVE_ERROR_SHAPE, "tokens");
  expect_error(record(0, ids, weights, keys.data(), ~size_t{0}), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "num_tokens");
  expect_error(record(0, ids, weights, nullptr, 3), CONCLAVE_ERROR_NULL_POINTER, "tokens");
  expect_error(record(0, nullptr, weights, nullptr, 0), CONCLAVE_ERROR_NULL_POINTER, "topk_ids");
  conclave_tensor spoiled = *weights;
  spoiled.row_stride = std::numeric_limits<int64_t>::max() / 2;
  expect_error(record(0, ids, &spoiled, nullptr, 0), CONCLAVE_ERROR_STRIDE, "topk_weights");
  spoiled.row_stride = 0;
  spoiled.data = static_cast<char*>(spoiled.data) + 1;
  expect_error(record(0, ids, &spoiled, nullptr, 0), CONCLAVE_ERROR_MISALIGNED, "topk_weights");
  call.ids.as<int32_t>()[2] = 1000;
  expect_error(record(0, ids, weights, nullptr, 0), CONCLAVE_ERROR_EXPERT_ID, "1000");
  int64_t recorded = -1;
  ASSERT_EQ(conclave_recorder_counts(ring.get(), 0, &recorded, nullptr), CONCLAVE_OK);
  EXPECT_EQ(recorded, 0);
  expect_error(conclave_recorder_counts(ring.get(), 1, &recorded, nullptr),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "layer");
  expect_error(conclave_recorder_write(ring.get(), "testdata/no-such/record.safetensors"),
               CONCLAVE_ERROR_FILE_WRITE, "no-such");
}

TEST_F(Records, BadRecorders_NameTheField) {
  const int64_t layers[] = {0, 0};
  const conclave_spec* const specs[] = {c_spec_.get(), nullptr};
  const conclave_spec* const twice[] = {c_spec_.get(), c_spec_.get()};
  conclave_recorder* out = nullptr;
  expect_error(conclave_recorder_create(layers, specs, 2, nullptr, &out),
               CONCLAVE_ERROR_NULL_POINTER, "specs[1]");
  expect_error(conclave_recorder_create(layers, twice, 2, nullptr, &out),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "layer");
  expect_error(conclave_recorder_create(layers, twice, ~size_t{0}, nullptr, &out),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "num_layers");
  const auto expect = [&](const char* names, auto spoil) {
    auto options = sized<conclave_recorder_options>();
    spoil(options);
    expect_error(conclave_recorder_create(layers, specs, 1, &options, &out),
                 CONCLAVE_ERROR_INVALID_ARGUMENT, names);
  };
  expect("capacity", [](auto& o) { o.capacity = -1; });
  expect("capacity", [](auto& o) { o.capacity = std::numeric_limits<int64_t>::max(); });
  expect("when_full", [](auto& o) { o.when_full = 3; });
  expect("reserved", [](auto& o) { o.reserved = 1; });
  expect("struct_size", [](auto& o) { o.struct_size = 12; });
  EXPECT_EQ(out, nullptr);
  conclave_replay* replay = nullptr;
  expect_error(conclave_replay_open("testdata/no-such", &replay), CONCLAVE_ERROR_FILE_NOT_FOUND,
               "no-such");
  EXPECT_NE(conclave_replay_open("testdata/qwen3-moe-tiny/reference.safetensors", &replay),
            CONCLAVE_OK);
  EXPECT_EQ(replay, nullptr);
}

TEST_F(Records, SeveralThreads_RecordAtOnce_WhileAnotherReads) {
  const auto ring = recorder();
  Call call(spec_, 4);
  const conclave_forward_args args = call.args();
  ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 8; ++i) {
        EXPECT_EQ(
            conclave_recorder_record(ring.get(), 0, &call.views[3], &call.views[4], nullptr, 0),
            CONCLAVE_OK);
      }
    });
  }
  for (int i = 0; i < 4; ++i) {
    make<conclave_replay>(&conclave_replay_from_recorder, ring.get());
  }
  for (std::thread& thread : threads) thread.join();
  int64_t recorded = 0;
  ASSERT_EQ(conclave_recorder_counts(ring.get(), 0, &recorded, nullptr), CONCLAVE_OK);
  EXPECT_EQ(recorded, 96);
}

// Rings of a device need one; what comes before is checked on any machine.
TEST_F(Records, RingsOfADevice_AreRefusedOnTheCpu) {
  const int64_t layers[] = {0};
  const conclave_spec* const specs[] = {c_spec_.get()};
  conclave_device_recorder* out = nullptr;
  const auto create = [&](const conclave_context* context, const int64_t* numbers, size_t count,
                          const conclave_recorder_options* options) {
    return conclave_device_recorder_create(context, numbers, specs, count, options, &out);
  };
  expect_error(create(context_.get(), layers, 1, nullptr), CONCLAVE_ERROR_UNSUPPORTED, "cpu");
  expect_error(create(nullptr, layers, 1, nullptr), CONCLAVE_ERROR_NULL_POINTER, "context");
  expect_error(create(context_.get(), nullptr, 1, nullptr), CONCLAVE_ERROR_NULL_POINTER, "layers");
  expect_error(create(context_.get(), layers, size_t{1} << 40, nullptr),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "num_layers");
  auto options = sized<conclave_recorder_options>();
  options.when_full = 9;
  expect_error(create(context_.get(), layers, 1, &options), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "options.when_full");
  expect_error(conclave_device_recorder_create(context_.get(), layers, specs, 1, nullptr, nullptr),
               CONCLAVE_ERROR_NULL_POINTER, "out");
  EXPECT_EQ(out, nullptr);
}

}  // namespace
}  // namespace conclave
