// Weights of another process through the C interface: what a writer publishes layers have, and what
// readers are told while it writes, when it is gone, and of files that are no such weights.
#include "capi/arrays.h"
#include "capi/local_ranks.h"

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

namespace conclave {
namespace {

using testing::Arrays;
using testing::expect_error;
using testing::Handle;
using testing::kArraysSpec;
using testing::kExperts;
using testing::kHidden;
using testing::kWidth;
using testing::make;
using testing::same_bits;
using testing::sized;

using Writer = Handle<conclave_shared_writer>;

class SharedSources : public ::testing::Test {
 protected:
  ~SharedSources() override { std::filesystem::remove(path_); }

  Writer writer(const conclave_source* source,
                const conclave_shared_writer_options* options = nullptr) const {
    return make<conclave_shared_writer>(&conclave_shared_writer_create, path_.c_str(), source,
                                        options);
  }
  Handle<conclave_source> reader(uint32_t flags = 0) const {
    return make<conclave_source>(&conclave_source_from_shared, path_.c_str(), flags);
  }
  conclave_status open(uint32_t flags = 0) const {
    conclave_source* out = nullptr;
    const conclave_status status = conclave_source_from_shared(path_.c_str(), flags, &out);
    EXPECT_EQ(out != nullptr, status == CONCLAVE_OK);
    conclave_source_destroy(out);
    return status;
  }
  Handle<conclave_layer> layer(const conclave_source* source) const {
    return make<conclave_layer>(&conclave_layer_create, context_.get(), spec_.get(), source,
                                nullptr, nullptr);
  }
  Tensor forward(const conclave_source* source) const { return forward(layer(source)); }
  Tensor forward(const Handle<conclave_layer>& of) const {
    Tensor out(DType::kF32, hidden_.shape());
    testing::forward(of.get(), hidden_, out);
    return out;
  }
  static uint64_t publish(const Writer& to, const Arrays& from, uint64_t version = 0) {
    uint64_t published = 0;
    EXPECT_EQ(
        conclave_shared_writer_publish_source(to.get(), from.source.get(), version, &published),
        CONCLAVE_OK)
        << conclave_last_error_message();
    return published;
  }

  // Parts of this program run beside each other.
  std::string path_ =
      ::testing::TempDir() + "capi_shared_weights_test." + std::to_string(::getpid());
  Handle<conclave_context> context_ = testing::make_context();
  Handle<conclave_spec> spec_ = make<conclave_spec>(&conclave_spec_from_json, kArraysSpec);
  Arrays old_{1};
  Arrays new_{11};
  Tensor hidden_ = testing::random_tensor(DType::kF32, 7, kHidden, 5);
};

TEST_F(SharedSources, LayersHaveWhatWasPublished_VersionByVersion) {
  auto options = sized<conclave_shared_writer_options>();
  options.layer = 17;
  const Writer to = writer(old_.source.get(), &options);
  EXPECT_EQ(open(), CONCLAVE_ERROR_FILE_CHANGED);  // nothing is published yet
  EXPECT_EQ(publish(to, old_), 1U);
  const auto first = reader();
  auto info = sized<conclave_shared_info>();
  ASSERT_EQ(conclave_source_get_shared_info(first.get(), &info), CONCLAVE_OK);
  EXPECT_EQ(info.version, 1U);
  EXPECT_EQ(info.layer, 17U);
  EXPECT_EQ(info.num_tensors, 4U);
  EXPECT_TRUE(same_bits(forward(first.get()), forward(old_.source.get())));
  EXPECT_EQ(conclave_source_check_unchanged(first.get()), CONCLAVE_OK);

  EXPECT_EQ(publish(to, new_, 40), 40U);
  expect_error(conclave_source_check_unchanged(first.get()), CONCLAVE_ERROR_FILE_CHANGED, "");
  conclave_layer* out = nullptr;
  expect_error(
      conclave_layer_create(context_.get(), spec_.get(), first.get(), nullptr, nullptr, &out),
      CONCLAVE_ERROR_FILE_CHANGED, "");
  const auto second = reader(CONCLAVE_SHARED_SKIP_CHECKSUM);
  auto serving = layer(old_.source.get());
  ASSERT_EQ(conclave_layer_reload(serving.get(), second.get(), CONCLAVE_RELOAD_MODE_STAGED),
            CONCLAVE_OK)
      << conclave_last_error_message();
  EXPECT_TRUE(same_bits(forward(serving), forward(new_.source.get())));
}

TEST_F(SharedSources, AWriterThatFillsTheMemory) {
  const Writer to = writer(old_.source.get());
  ASSERT_EQ(conclave_shared_writer_begin(to.get()), CONCLAVE_OK);
  EXPECT_EQ(open(), CONCLAVE_ERROR_FILE_CHANGED);
  expect_error(conclave_shared_writer_begin(to.get()), CONCLAVE_ERROR_STATE, "begun");
  const auto fill = [&](const char* tensor, int64_t expert, const Tensor& from, size_t offset,
                        size_t size) {
    void* data = nullptr;
    size_t bytes = 0;
    ASSERT_EQ(conclave_shared_writer_memory(to.get(), tensor, expert, &data, &bytes), CONCLAVE_OK)
        << conclave_last_error_message();
    EXPECT_EQ(bytes, size);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0U);
    std::memcpy(data, from.as<std::byte>() + offset, size);
  };
  constexpr size_t kMatrix = kWidth * kHidden * 2;
  for (int64_t expert = 0; expert < kExperts; ++expert) {
    const auto at = static_cast<size_t>(expert);
    fill("gate", expert, new_.gate_up, 2 * at * kMatrix, kMatrix);
    fill("up", expert, new_.gate_up, (2 * at + 1) * kMatrix, kMatrix);
    fill("down", expert, new_.down, at * kMatrix, kMatrix);
  }
  fill("router", 0, new_.router, 0, new_.router.size_bytes());
  uint64_t published = 0;
  ASSERT_EQ(conclave_shared_writer_publish(to.get(), 3, &published), CONCLAVE_OK);
  EXPECT_EQ(published, 3U);
  EXPECT_TRUE(same_bits(forward(reader().get()), forward(new_.source.get())));
}

// Experts of one rank, which a refit of its layer takes in.
TEST_F(SharedSources, SomeExperts_ServeARefit) {
  const std::vector<int32_t> experts = {4, 1};
  auto options = sized<conclave_shared_writer_options>();
  options.experts = experts.data();
  options.experts_count = experts.size();
  const Writer to = writer(new_.source.get(), &options);
  publish(to, new_);
  const auto source = reader();
  const auto listed =
      nlohmann::json::parse(testing::text_by(&conclave_source_shared_tensors_json, source.get()));
  ASSERT_EQ(listed.size(), 4U);
  for (const auto& row : listed) {
    const bool is_router = row.at("name") == "router";
    EXPECT_EQ(row.at("experts"), is_router ? std::vector<int32_t>() : experts) << row;
  }
  const std::vector<const char*> tensors = {"gate_up", "down"};
  const conclave_refit_scope scope = testing::scope_of(experts, tensors);
  auto refit_options = sized<conclave_refit_options>();
  refit_options.scope = &scope;
  const auto found = layer(old_.source.get());
  const auto expected = layer(old_.source.get());
  for (const auto& [to_layer, from] :
       {std::pair{found.get(), source.get()}, std::pair{expected.get(), new_.source.get()}}) {
    const auto refit = make<conclave_refit>(&conclave_refit_create, to_layer, &refit_options);
    ASSERT_EQ(conclave_refit_stage(refit.get(), from, nullptr), CONCLAVE_OK)
        << conclave_last_error_message();
    ASSERT_EQ(conclave_refit_commit(refit.get()), CONCLAVE_OK);
  }
  EXPECT_TRUE(same_bits(forward(found), forward(expected)));
  EXPECT_FALSE(same_bits(forward(found), forward(old_.source.get())));
  conclave_layer* out = nullptr;
  expect_error(
      conclave_layer_create(context_.get(), spec_.get(), source.get(), nullptr, nullptr, &out),
      CONCLAVE_ERROR_TENSOR_MISSING, "");
}

TEST_F(SharedSources, WhatAWriterIsGivenWrong_IsATypedError_AndNothingIsMarked) {
  const Writer to = writer(old_.source.get());
  publish(to, old_, 9);
  void* data = nullptr;
  size_t bytes = 0;
  uint64_t published = 77;
  const auto memory = [&](const char* tensor, int64_t expert) {
    return conclave_shared_writer_memory(to.get(), tensor, expert, &data, &bytes);
  };
  expect_error(memory("gate", 0), CONCLAVE_ERROR_STATE, "gate");  // before begin
  expect_error(conclave_shared_writer_publish(to.get(), 10, &published), CONCLAVE_ERROR_STATE, "");
  // Other tensors than those of the file: one is missing, one has another shape.
  const auto without = new_.source_of(nullptr, kExperts, {"gate_up", "down"});
  expect_error(conclave_shared_writer_publish_source(to.get(), without.get(), 0, &published),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "router");
  const auto fewer = new_.source_of(nullptr, kExperts - 1, {"gate_up", "down", "router"});
  expect_error(conclave_shared_writer_publish_source(to.get(), fewer.get(), 0, &published),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "gate");
  EXPECT_EQ(open(), CONCLAVE_OK);
  // A version that is not larger: the bytes are there, and a larger one may follow.
  expect_error(conclave_shared_writer_publish_source(to.get(), new_.source.get(), 9, &published),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "version");
  EXPECT_EQ(open(), CONCLAVE_ERROR_FILE_CHANGED);
  expect_error(memory("gate", -1), CONCLAVE_ERROR_INVALID_ARGUMENT, "expert -1");
  expect_error(memory("gate", kExperts), CONCLAVE_ERROR_INVALID_ARGUMENT, "expert 6");
  expect_error(memory("gate", std::numeric_limits<int64_t>::max()), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "gate");
  expect_error(memory("gate_up", 0), CONCLAVE_ERROR_INVALID_ARGUMENT, "gate_up");
  expect_error(memory("down_scale", 0), CONCLAVE_ERROR_INVALID_ARGUMENT, "down_scale");
  expect_error(memory("", 0), CONCLAVE_ERROR_INVALID_ARGUMENT, "tensor");
  expect_error(memory(nullptr, 0), CONCLAVE_ERROR_NULL_POINTER, "tensor");
  expect_error(conclave_shared_writer_memory(to.get(), "gate", 0, nullptr, &bytes),
               CONCLAVE_ERROR_NULL_POINTER, "data");
  expect_error(conclave_shared_writer_memory(to.get(), "gate", 0, &data, nullptr),
               CONCLAVE_ERROR_NULL_POINTER, "bytes");
  EXPECT_EQ(data, nullptr);
  EXPECT_EQ(published, 77U);
  alignas(uint64_t) char shifted[16];
  expect_error(
      conclave_shared_writer_publish(to.get(), 0, reinterpret_cast<uint64_t*>(shifted + 1)),
      CONCLAVE_ERROR_MISALIGNED, "published");
  EXPECT_EQ(publish(to, new_), 10U);
  EXPECT_TRUE(same_bits(forward(reader().get()), forward(new_.source.get())));
}

TEST_F(SharedSources, WritersThatCannotBe_AreTypedErrors) {
  conclave_shared_writer* out = nullptr;
  const auto create = [&](const char* path, const conclave_source* source,
                          const conclave_shared_writer_options* options) {
    return conclave_shared_writer_create(path, source, options, &out);
  };
  const conclave_source* const source = old_.source.get();
  expect_error(create(nullptr, source, nullptr), CONCLAVE_ERROR_NULL_POINTER, "path");
  expect_error(create(path_.c_str(), nullptr, nullptr), CONCLAVE_ERROR_NULL_POINTER, "source");
  expect_error(conclave_shared_writer_create(path_.c_str(), source, nullptr, nullptr),
               CONCLAVE_ERROR_NULL_POINTER, "out");
  const std::string nowhere = ::testing::TempDir() + "no such folder/weights";
  EXPECT_GE(create(nowhere.c_str(), source, nullptr), CONCLAVE_ERROR_FILE_NOT_FOUND);
  const std::string pipe = path_ + ".pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  expect_error(create(pipe.c_str(), source, nullptr), CONCLAVE_ERROR_FILE_WRITE, pipe.c_str());
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  std::filesystem::remove(pipe);
  auto options = sized<conclave_shared_writer_options>();
  for (const std::vector<int32_t>& experts : {std::vector<int32_t>{6}, {-1}, {2, 2}}) {
    options.experts = experts.data();
    options.experts_count = experts.size();
    expect_error(create(path_.c_str(), source, &options), CONCLAVE_ERROR_INVALID_ARGUMENT, "");
  }
  options.experts_count = size_t{1} << 50;
  expect_error(create(path_.c_str(), source, &options), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "experts_count");
  options.experts = nullptr;
  options.experts_count = 1;
  expect_error(create(path_.c_str(), source, &options), CONCLAVE_ERROR_NULL_POINTER, "experts");
  options.struct_size = 3;
  expect_error(create(path_.c_str(), source, &options), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "struct_size");
  EXPECT_EQ(out, nullptr);
  EXPECT_FALSE(std::filesystem::exists(path_));
  expect_error(conclave_shared_writer_begin(nullptr), CONCLAVE_ERROR_NULL_POINTER, "writer");
  expect_error(conclave_shared_writer_publish(nullptr, 0, nullptr), CONCLAVE_ERROR_NULL_POINTER,
               "writer");
}

TEST_F(SharedSources, FilesThatAreNoSuchWeights_AreTypedErrors) {
  EXPECT_EQ(open(), CONCLAVE_ERROR_FILE_NOT_FOUND);
  std::ofstream(path_) << "a text of some length that is no header of shared weights at all";
  EXPECT_EQ(open(), CONCLAVE_ERROR_INVALID_ARGUMENT);
  std::filesystem::remove(path_);
  publish(writer(old_.source.get()), old_);
  EXPECT_EQ(open(), CONCLAVE_OK);  // the writer is gone, the file is not
  EXPECT_EQ(open(2), CONCLAVE_ERROR_INVALID_ARGUMENT);
  std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-1, std::ios::end);
  const auto last = static_cast<char>(file.get() ^ 1);
  file.seekp(-1, std::ios::end);
  file.put(last);
  file.close();
  EXPECT_EQ(open(), CONCLAVE_ERROR_FILE_CHANGED);
  EXPECT_EQ(open(CONCLAVE_SHARED_SKIP_CHECKSUM), CONCLAVE_OK);
  conclave_source* out = nullptr;
  expect_error(conclave_source_from_shared(nullptr, 0, &out), CONCLAVE_ERROR_NULL_POINTER, "path");
  expect_error(conclave_source_from_shared(path_.c_str(), 0, nullptr), CONCLAVE_ERROR_NULL_POINTER,
               "out");
  auto info = sized<conclave_shared_info>();
  expect_error(conclave_source_get_shared_info(old_.source.get(), &info),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "conclave_source_from_shared");
  char* text = nullptr;
  expect_error(conclave_source_shared_tensors_json(old_.source.get(), &text),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "conclave_source_from_shared");
  EXPECT_EQ(text, nullptr);
  EXPECT_EQ(conclave_source_check_unchanged(old_.source.get()), CONCLAVE_OK);
}

}  // namespace
}  // namespace conclave
