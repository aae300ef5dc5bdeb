#include "checkpoint/gguf_pushed.h"

#include "core/spec_fields.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <span>
#include <tuple>
#include <utility>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;

// Files of a model in their order.
std::vector<fs::path> parts_of(const std::string& model) {
  std::vector<fs::path> parts;
  for (const auto& entry : fs::directory_iterator(kGgufModels / model)) {
    if (entry.path().extension() == ".gguf") parts.push_back(entry.path());
  }
  std::sort(parts.begin(), parts.end());
  return parts;
}

template <class Value>
bool same_fields(const Value& one, const Value& other) {
  if constexpr (HasFields<Value>) {
    const auto left = tie_fields(one);
    const auto right = tie_fields(other);
    return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      return (same_fields(std::get<kIndex>(left), std::get<kIndex>(right)) && ...);
    }(std::make_index_sequence<std::tuple_size_v<decltype(left)>>());
  } else {
    return one == other;
  }
}

}  // namespace

Bytes bytes_of_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  Bytes bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

Bytes keys_of(const GgufReader& model, const std::vector<GgufKey>& others,
              const std::vector<Listed>& listed) {
  std::vector<GgufKey> keys = others;
  for (GgufKey& key : model.keys()) {
    const bool is_replaced =
        std::ranges::any_of(others, [&](const GgufKey& other) { return other.name == key.name; });
    if (!is_replaced) keys.push_back(std::move(key));
  }
  Bytes bytes;
  const auto add = [&](const void* data, size_t count) {
    const auto* const begin = static_cast<const std::byte*>(data);
    bytes.insert(bytes.end(), begin, begin + count);
  };
  const uint32_t start[] = {0x46554747, 3};
  const uint64_t counts[] = {listed.size(), keys.size()};
  add(start, sizeof(start));
  add(counts, sizeof(counts));
  for (const GgufKey& key : keys) {
    const uint64_t length = key.name.size();
    add(&length, sizeof(length));
    add(key.name.data(), key.name.size());
    add(key.value.data(), key.value.size());
  }
  uint64_t offset = 0;
  for (const Listed& tensor : listed) {
    const uint64_t length = tensor.name.size();
    const auto rank = static_cast<uint32_t>(tensor.dims.size());
    constexpr uint32_t kF32 = 0;
    add(&length, sizeof(length));
    add(tensor.name.data(), tensor.name.size());
    add(&rank, sizeof(rank));
    add(tensor.dims.data(), tensor.dims.size() * sizeof(uint64_t));
    add(&kF32, sizeof(kF32));
    add(&offset, sizeof(offset));
    uint64_t size = 4;
    for (const uint64_t dim : tensor.dims) size *= dim;
    offset += (size + 31) / 32 * 32;
  }
  return bytes;
}

std::vector<PushedTensor> tensors_of(const GgufReader& model) {
  std::vector<PushedTensor> tensors;
  for (const GgufTensorInfo& info : model.tensors()) {
    PushedTensor pushed{.name = info.name,
                        .type = gguf_type_number(info.type),
                        .shape = Shape(std::span<const int64_t>(info.shape)),
                        .bytes = Bytes(info.bytes)};
    model.read(info, 0, pushed.bytes);
    tensors.push_back(std::move(pushed));
  }
  return tensors;
}

PushedModel::PushedModel(const std::string& name)
    : files(parts_of(name)),
      reader(GgufReader::open(files.front())),
      checkpoint(Checkpoint::open(files.front())),
      tensors(tensors_of(reader)) {}

CheckpointFeed PushedModel::feed_with_list() const {
  std::vector<Bytes> headers;
  for (const fs::path& file : files) headers.push_back(bytes_of_file(file));
  std::vector<std::span<const std::byte>> others(headers.begin() + 1, headers.end());
  return CheckpointFeed::from_gguf(headers.front(), others);
}

const PushedTensor& PushedModel::tensor(std::string_view name) const {
  const auto at = std::ranges::find(tensors, name, &PushedTensor::name);
  EXPECT_NE(at, tensors.end()) << name;
  return *at;
}

std::set<std::string> PushedModel::wanted() const {
  std::set<std::string> names;
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    const auto own = checkpoint.layer_tensors(layer.index);
    names.insert(own.begin(), own.end());
  }
  return names;
}

void put_projections_first(std::vector<PushedTensor>& tensors) {
  std::ranges::stable_partition(tensors, [](const PushedTensor& tensor) {
    return tensor.name.find("_latent_") != std::string::npos;
  });
}

void put_all(CheckpointFeed& feed, const std::vector<PushedTensor>& tensors, FeedMemory memory) {
  for (const PushedTensor& tensor : tensors) feed.put(tensor.name, tensor.view(), memory);
}

Bytes matrix_bytes(const WeightSource& source, WeightId id, int64_t expert) {
  const WeightInfo info = source.describe(id);
  Bytes bytes(static_cast<size_t>(info.rows * ((info.cols * bit_size(info.dtype) + 7) / 8)));
  source.read(id, expert, {0, info.rows, 0, info.cols}, bytes);
  return bytes;
}

void expect_layers_of(const CheckpointFeed& feed, const Checkpoint& checkpoint) {
  EXPECT_EQ(feed.missing(), std::vector<std::string>());
  ASSERT_EQ(feed.layers().size(), checkpoint.layers().size());
  for (const CheckpointLayer& expected : checkpoint.layers()) {
    SCOPED_TRACE(expected.prefix);
    ASSERT_TRUE(feed.is_complete(expected.index));
    const CheckpointLayer layer = feed.layer(expected.index);
    EXPECT_TRUE(same_fields(layer.spec, expected.spec));
    EXPECT_EQ(layer.layout, expected.layout);
    EXPECT_EQ(layer.prefix, expected.prefix);
    EXPECT_EQ(layer.bytes, expected.bytes);
    EXPECT_EQ(layer.parameters.total, expected.parameters.total);
    EXPECT_EQ(layer.support.reason(), expected.support.reason());
    const auto pushed = feed.layer_source(expected.index);
    const auto read = checkpoint.layer_source(expected.index);
    for (const WeightId id : weights::kAll) {
      const WeightInfo info = read->describe(id);
      ASSERT_EQ(pushed->describe(id).count, info.count) << to_string(id);
      EXPECT_EQ(pushed->describe(id).dtype, info.dtype) << to_string(id);
      for (int64_t expert = 0; expert < info.count; ++expert) {
        ASSERT_EQ(matrix_bytes(*pushed, id, expert), matrix_bytes(*read, id, expert))
            << pushed->locate(id, expert);
      }
    }
  }
}

}  // namespace conclave::testing
