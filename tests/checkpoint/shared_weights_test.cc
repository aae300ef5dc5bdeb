// Weights in shared memory: what a reader gets, writers that go on, end early or lie.
#include "conclave/shared_weights.h"

#include "checkpoint/shared/shared_layout.h"
#include "support/layer_fixture.h"

#include "conclave/refit.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;

std::vector<SharedTensor> tensors_of(const WeightSource& source,
                                     const std::vector<int32_t>& experts = {}) {
  std::vector<SharedTensor> tensors;
  for (const WeightId id : weights::kAll) {
    const WeightInfo info = source.describe(id);
    const bool is_routed = id.mlp() == WeightMlp::kRouted;
    if (info.count == 0 || (!experts.empty() && !is_routed)) continue;
    tensors.push_back({.id = id, .info = info, .experts = experts});
  }
  return tensors;
}

void write_all(SharedWeightsWriter& writer, const WeightSource& source,
               const std::vector<SharedTensor>& tensors) {
  for (const SharedTensor& tensor : tensors) {
    const auto write = [&](int64_t expert) {
      source.read(tensor.id, expert, {0, tensor.info.rows, 0, tensor.info.cols},
                  writer.memory(tensor.id, expert));
    };
    for (const int32_t expert : tensor.experts) write(expert);
    for (int64_t e = 0; tensor.experts.empty() && e < tensor.info.count; ++e) write(e);
  }
}

class SharedWeightsFile : public ::testing::Test {
 protected:
  SharedWeightsFile() {
    spec_.quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32};
    first_ = make_synthetic_source(spec_, 3);
    second_ = make_synthetic_source(spec_, 4);
  }
  ~SharedWeightsFile() override { std::filesystem::remove(path_); }

  SharedWeightsWriter publish(const WeightSource& source,
                              const std::vector<int32_t>& experts = {}) const {
    const std::vector<SharedTensor> tensors = tensors_of(source, experts);
    SharedWeightsWriter writer(path_, tensors, 7);
    writer.begin();
    write_all(writer, source, tensors);
    writer.publish();
    return writer;
  }
  Tensor run(const MoeLayer& layer) const {
    return testing::run_layer(layer, hidden_.view(), DType::kF32).out;
  }
  std::vector<char> bytes() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void put(const std::vector<char>& bytes) const {
    std::filesystem::remove(path_);
    std::ofstream(path_, std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  ErrorCode open_code() const {
    return code_of([&] { SharedWeights weights(path_); });
  }

  MoeSpec spec_ = testing::make_spec(6, 2, 64, 32, DType::kI4);
  std::filesystem::path path_ =
      std::filesystem::temp_directory_path() /
      ("shared_weights." +
       std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()));
  Context context_{{.num_threads = 2}};
  Tensor hidden_ = testing::random_tensor(DType::kF32, 5, 64, 5);
  std::unique_ptr<WeightSource> first_;
  std::unique_ptr<WeightSource> second_;
};

TEST_F(SharedWeightsFile, LayersAndRefits_ReadWhatWasWritten) {
  SharedWeightsWriter writer = publish(*first_);
  const SharedWeights shared(path_);
  EXPECT_EQ(shared.version(), 1U);
  EXPECT_EQ(shared.layer(), 7U);
  EXPECT_EQ(shared.tensors().size(), tensors_of(*first_).size());
  MoeLayer layer = MoeLayer::create(context_, spec_, shared);
  const MoeLayer from_first = MoeLayer::create(context_, spec_, *first_);
  EXPECT_EQ(Refit::content_hash(layer), Refit::content_hash(from_first));

  const SharedWeightsWriter some = publish(*second_, {4, 1});
  const SharedWeights part(path_);
  EXPECT_EQ(part.tensors().front().experts, (std::vector<int32_t>{4, 1}));
  {
    Refit whole(layer);
    EXPECT_EQ(code_of([&] { whole.stage(part); }), ErrorCode::kTensorMissing);
  }
  {
    Refit other(layer, {.scope = {.experts = {2}}});
    EXPECT_EQ(code_of([&] { other.stage(part); }), ErrorCode::kTensorMissing);
  }
  Refit refit(layer, {.scope = {.experts = {1, 4}}});
  refit.stage(part);
  refit.commit();
  EXPECT_FALSE(testing::same_bits(run(layer), run(from_first)));
  shared.check_unchanged();  // its file has another name's place, but is whole
}

TEST_F(SharedWeightsFile, WriterThatGoesOn_IsNoticedBeforeAnythingIsUsed) {
  SharedWeightsWriter writer = publish(*first_);
  const SharedWeights shared(path_);
  MoeLayer layer = MoeLayer::create(context_, spec_, shared);
  const Tensor before = run(layer);
  writer.begin();
  EXPECT_EQ(code_of([&] { writer.begin(); }), ErrorCode::kState);
  EXPECT_EQ(open_code(), ErrorCode::kFileChanged);
  EXPECT_EQ(code_of([&] { shared.check_unchanged(); }), ErrorCode::kFileChanged);
  for (const RefitMode mode : {RefitMode::kStaged, RefitMode::kStagedCopy}) {
    Refit refit(layer, {.mode = mode});
    EXPECT_EQ(code_of([&] { refit.stage(shared); }), ErrorCode::kFileChanged);
    EXPECT_EQ(code_of([&] { refit.commit(); }), ErrorCode::kFileChanged);
  }
  EXPECT_EQ(code_of([&] { layer.reload(shared, ReloadMode::kStaged); }), ErrorCode::kFileChanged);
  EXPECT_EQ(code_of([&] { MoeLayer::create(context_, spec_, shared); }), ErrorCode::kFileChanged);
  EXPECT_TRUE(testing::same_bits(run(layer), before));
  writer.publish(9);
  EXPECT_EQ(code_of([&] { shared.check_unchanged(); }), ErrorCode::kFileChanged);
  EXPECT_EQ(SharedWeights(path_).version(), 9U);
  writer.begin();
  EXPECT_EQ(code_of([&] { writer.publish(9); }), ErrorCode::kInvalidArgument);
}

TEST_F(SharedWeightsFile, WriterThatEnds_LeavesATypedError) {
  const std::vector<SharedTensor> tensors = tensors_of(*first_);
  { const SharedWeightsWriter writer(path_, tensors); }
  EXPECT_EQ(open_code(), ErrorCode::kFileChanged);
  {
    SharedWeightsWriter writer(path_, tensors);
    writer.begin();
  }
  EXPECT_EQ(open_code(), ErrorCode::kFileChanged);
  std::filesystem::remove(path_);
  EXPECT_EQ(open_code(), ErrorCode::kFileNotFound);
}

TEST_F(SharedWeightsFile, WriterChecksWhatItIsGiven) {
  const std::vector<SharedTensor> tensors = tensors_of(*first_);
  SharedWeightsWriter writer(path_, tensors);
  EXPECT_EQ(code_of([&] { writer.memory(weights::kUp, 0); }), ErrorCode::kState);
  EXPECT_EQ(code_of([&] { writer.publish(); }), ErrorCode::kState);
  writer.begin();
  EXPECT_EQ(code_of([&] { writer.memory(weights::kUp, 6); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { writer.memory(weights::kSharedUp, 0); }), ErrorCode::kInvalidArgument);
  const std::vector<std::byte> few(3);
  EXPECT_EQ(code_of([&] { writer.write(weights::kUp, 0, few); }), ErrorCode::kShape);
  const auto make_code = [&](const std::vector<SharedTensor>& wrong) {
    return code_of([&] { SharedWeightsWriter other(path_, wrong); });
  };
  const SharedTensor good{.id = weights::kUp, .info = {6, 32, 64, DType::kF32}};
  const auto with = [&](const std::function<void(SharedTensor&)>& change) {
    SharedTensor tensor = good;
    change(tensor);
    return std::vector{tensor};
  };
  EXPECT_EQ(make_code({}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(make_code({good, good}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(make_code(with([](auto& t) { t.info.count = 0; })), ErrorCode::kInvalidArgument);
  EXPECT_EQ(make_code(with([](auto& t) { t.info.rows = -1; })), ErrorCode::kInvalidArgument);
  EXPECT_EQ(make_code(with([](auto& t) { t.info.rows = INT64_MAX; })), ErrorCode::kInvalidArgument);
  EXPECT_EQ(make_code(with([](auto& t) { t.experts = {1, 1}; })), ErrorCode::kInvalidArgument);
  EXPECT_EQ(make_code(with([](auto& t) { t.experts = {6}; })), ErrorCode::kInvalidArgument);
  EXPECT_EQ(make_code(with([](auto& t) {
              t.info = {1, 3, 3, DType::kI4};
            })),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(make_code(with([](auto& t) {
              t.info = {1 << 20, 1 << 20, 1 << 20, DType::kF32};
            })),
            ErrorCode::kFileWrite);
  const WeightInfo huge{1 << 20, 1 << 20, 1 << 20, DType::kF32};
  EXPECT_EQ(make_code({{.id = weights::kUp, .info = huge},
                       {.id = weights::kGate, .info = huge},
                       {.id = weights::kDown, .info = huge}}),
            ErrorCode::kSizeOverflow);
}

// No byte of a file that another process made can do more than cause a typed error.
TEST_F(SharedWeightsFile, HostileFiles_AreRefused) {
  { const SharedWeightsWriter writer = publish(*first_, {1, 4}); }
  const std::vector<char> good = bytes();
  ASSERT_EQ(open_code(), ErrorCode{0});
  for (const size_t size : {size_t{0}, size_t{1}, sizeof(checkpoint::SharedHeader), size_t{200},
                            good.size() - 1, good.size() + 1}) {
    std::vector<char> cut = good;
    cut.resize(size);
    put(cut);
    EXPECT_EQ(open_code(), ErrorCode::kInvalidArgument) << size;
  }
  // Any byte that differs, wherever it lies.
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    std::vector<char> damaged = good;
    const size_t at = i < 80 ? static_cast<size_t>(i) : random() % damaged.size();
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << (random() % 8)));
    put(damaged);
    const ErrorCode code = open_code();
    // The marks themselves, which change while readers look, are in no hash.
    if (at >= offsetof(checkpoint::SharedHeader, sequence) &&
        at < offsetof(checkpoint::SharedHeader, checksum)) {
      continue;
    }
    EXPECT_TRUE(code == ErrorCode::kInvalidArgument || code == ErrorCode::kFileChanged)
        << at << " " << static_cast<int>(code);
  }
}

// Headers whose hash is right but whose numbers are not.
TEST_F(SharedWeightsFile, HeadersThatLie_AreRefused) {
  { const SharedWeightsWriter writer = publish(*first_, {1, 4}); }
  const std::vector<char> good = bytes();
  std::mt19937_64 random(1);
  const size_t rows = tensors_of(*first_, {1, 4}).size();
  const uint64_t values[] = {0,
                             1,
                             2,
                             6,
                             7,
                             uint64_t{1} << 20,
                             uint64_t{1} << 31,
                             uint64_t{1} << 40,
                             uint64_t{1} << 62,
                             uint64_t{1} << 63,
                             ~uint64_t{0}};
  int64_t refused = 0;
  for (int i = 0; i < 400; ++i) {
    std::vector<char> lying = good;
    const size_t words = (sizeof(checkpoint::SharedHeader) +
                          rows * (sizeof(checkpoint::SharedRow) + 2 * sizeof(int32_t))) /
                         8;
    const uint64_t value = values[random() % std::size(values)];
    std::memcpy(lying.data() + 8 * (1 + random() % (words - 1)), &value, sizeof(value));
    checkpoint::SharedHeader header;
    std::memcpy(&header, lying.data(), sizeof(header));
    const auto* first = reinterpret_cast<const std::byte*>(lying.data()) + sizeof(header);
    const uint64_t row_bytes =
        header.num_tensors * sizeof(checkpoint::SharedRow) + header.num_experts * sizeof(int32_t);
    if (header.num_experts < 1000 && row_bytes < lying.size() - sizeof(header)) {
      header.hash = checkpoint::hash_of(header, {first, row_bytes});
      std::memcpy(lying.data(), &header, sizeof(header));
    }
    put(lying);
    try {
      const SharedWeights weights(path_);
      for (const SharedTensor& tensor : weights.tensors()) {
        for (const int32_t expert : tensor.experts) {
          EXPECT_FALSE(weights.view(tensor.id, expert).empty());
        }
      }
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 200);
}

}  // namespace
}  // namespace conclave
