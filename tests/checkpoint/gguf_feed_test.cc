// Tensors of GGUF models pushed in any order give the same layers as the files that have them.
#include "checkpoint/gguf_pushed.h"

#include "conclave/checkpoint.h"
#include "conclave/context.h"
#include "conclave/gguf.h"
#include "conclave/layer.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(kGgufModels)) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class GgufFeedOfModel : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Models, GgufFeedOfModel, ::testing::ValuesIn(model_names()),
                         [](const auto& row) {
                           std::string name = row.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(GgufFeedOfModel, ShuffledTensors_GiveWhatTheFileGives) {
  PushedModel model(GetParam());
  const std::set<std::string> wanted = model.wanted();
  for (const bool is_listed : {true, false}) {
    for (const FeedMemory memory : {FeedMemory::kCopy, FeedMemory::kKeep}) {
      std::mt19937 random(is_listed ? 3 : 4);
      std::shuffle(model.tensors.begin(), model.tensors.end(), random);
      if (!is_listed) put_projections_first(model.tensors);
      SCOPED_TRACE(is_listed ? "with the list" : "without the list");
      CheckpointFeed feed = is_listed ? model.feed_with_list() : model.feed_without_list();
      for (const PushedTensor& tensor : model.tensors) {
        EXPECT_EQ(feed.put(tensor.name, tensor.view(), memory), wanted.contains(tensor.name))
            << tensor.name;
      }
      expect_layers_of(feed, model.checkpoint);
    }
  }
}

TEST_P(GgufFeedOfModel, EachTensor_IsMissedByNameUntilItComes) {
  const PushedModel model(GetParam());
  CheckpointFeed feed = model.feed_with_list();
  std::set<std::string> expected = model.wanted();
  for (const PushedTensor& tensor : model.tensors) {
    std::set<std::string> missing;
    for (const std::string& text : feed.missing(10'000))
      missing.insert(text.substr(0, text.find(' ')));
    EXPECT_EQ(missing, expected);
    feed.put(tensor.name, tensor.view());
    expected.erase(tensor.name);
  }
  EXPECT_EQ(feed.missing(), std::vector<std::string>());
}

// What comes later may make a layer complete, and never one that was.
TEST_P(GgufFeedOfModel, WithoutAList_LayersAreCompleteWhenAllOfTheirExpertsHaveCome) {
  PushedModel model(GetParam());
  put_projections_first(model.tensors);
  for (const PushedTensor& last : model.tensors) {
    const bool is_optional = last.name.find("exp_probs_b") != std::string::npos ||
                             last.name.find("_exps.scale") != std::string::npos ||
                             last.name.find("_latent_") != std::string::npos ||
                             last.name.find("shexp") != std::string::npos;
    if (!model.wanted().contains(last.name) || is_optional) continue;
    SCOPED_TRACE(last.name);
    CheckpointFeed feed = model.feed_without_list();
    for (const PushedTensor& tensor : model.tensors) {
      if (tensor.name != last.name) feed.put(tensor.name, tensor.view());
    }
    const auto missing = feed.missing();
    // A fused tensor could as well be two.
    const bool is_fused = last.name.find("gate_up") != std::string::npos;
    ASSERT_EQ(missing.size(), is_fused ? 2U : 1U);
    if (!is_fused) {
      EXPECT_EQ(missing[0].substr(0, missing[0].find(' ')), last.name);
    }
    feed.put(last.name, last.view());
    expect_layers_of(feed, model.checkpoint);
  }
}

TEST_P(GgufFeedOfModel, ReleasedAndPutAgain_ReloadsTheLayer) {
  PushedModel model(GetParam());
  put_projections_first(model.tensors);
  const int64_t index = model.checkpoint.layers().front().index;
  const std::vector<std::string> names = model.checkpoint.layer_tensors(index);
  const std::set<std::string> own(names.begin(), names.end());
  for (const bool is_listed : {true, false}) {
    CheckpointFeed feed = is_listed ? model.feed_with_list() : model.feed_without_list();
    put_all(feed, model.tensors);
    const CheckpointLayer described = feed.layer(index);
    if (!described.support) continue;
    const Context context({.num_threads = 1});
    MoeLayer layer =
        MoeLayer::create(context, described.spec, *feed.layer_source(index), {.max_tokens = 4});
    feed.release(index);
    EXPECT_FALSE(feed.is_complete(index));
    const auto error = error_of([&] { feed.layer_source(index); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kTensorMissing) << error->what();
    for (const PushedTensor& tensor : model.tensors) {
      if (own.contains(tensor.name)) feed.put(tensor.name, tensor.view());
    }
    expect_layers_of(feed, model.checkpoint);
    EXPECT_NO_THROW(layer.reload(*feed.layer_source(index), ReloadMode::kStaged));
  }
}

// Files of one type of blocks for all experts, each of 256 columns.
TEST(GgufFeed, EveryTypeOfBlocks_HasTheBitsOfItsFile) {
  const SafetensorsFile blocks = SafetensorsFile::open(kGgufModels / "blocks.safetensors");
  const fs::path path = fs::path(::testing::TempDir()) / "one-type.gguf";
  constexpr int64_t kSize = 256;
  size_t types = 0;
  for (const WeightForm& form : gguf_block_forms()) {
    SCOPED_TRACE(form.name);
    const Tensor stored = blocks.load(std::string(form.name));
    const auto pool = std::span(static_cast<const std::byte*>(stored.view().data),
                                static_cast<size_t>(stored.shape().num_elements()));
    const std::vector<GgufKey> keys = {GgufKey::of_text("general.architecture", "qwen3moe"),
                                       GgufKey::of_u32("qwen3moe.block_count", 1),
                                       GgufKey::of_u32("qwen3moe.embedding_length", kSize),
                                       GgufKey::of_u32("qwen3moe.expert_count", 2),
                                       GgufKey::of_u32("qwen3moe.expert_used_count", 1)};
    GgufWriter writer(path, keys);
    writer.declare("blk.0.ffn_gate_inp.weight", "F32", {2, kSize});
    const std::vector<std::string> names = {"gate", "up", "down"};
    for (const std::string& name : names) {
      writer.declare("blk.0.ffn_" + name + "_exps.weight", form.name, {2, kSize, kSize});
    }
    writer.write(Bytes(2 * kSize * 4));
    for (size_t matrix = 0; matrix < names.size(); ++matrix) {
      Bytes bytes(2 * kSize * gguf_row_bytes(form.name, kSize));
      const size_t first = matrix * pool.size() / 24;  // another block than the others begin with
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = pool[(first + i) % pool.size()];
      writer.write(bytes);
    }
    writer.finish();

    const Checkpoint checkpoint = Checkpoint::open(path);
    CheckpointFeed feed = CheckpointFeed::from_gguf(keys_of(GgufReader::open(path)));
    put_all(feed, tensors_of(GgufReader::open(path)));
    expect_layers_of(feed, checkpoint);
    ++types;
  }
  EXPECT_EQ(types, 25U);
}

TEST(GgufFeed, BytesBehindTheHeader_MayEndAnywhere) {
  const PushedModel model("qwen3moe-q4_k_m");
  const Bytes whole = bytes_of_file(model.files.front());
  size_t data = 0;
  for (const PushedTensor& tensor : model.tensors) data += tensor.bytes.size();
  for (const size_t behind : {size_t{0}, size_t{1}, data / 2, data - 1, data}) {
    SCOPED_TRACE(behind);
    CheckpointFeed feed =
        CheckpointFeed::from_gguf(std::span(whole).first(whole.size() - data + behind));
    EXPECT_EQ(feed.missing(1'000).size(), model.wanted().size());
    put_all(feed, model.tensors);
    expect_layers_of(feed, model.checkpoint);
  }
}

TEST(GgufFeed, LayersWithoutAList_ComeWithTheirTensors) {
  const PushedModel dense("gemma4-q8_0");
  CheckpointFeed feed = dense.feed_without_list();
  EXPECT_TRUE(feed.layers().empty()) << "the architecture leaves it to the tensors";
  put_all(feed, dense.tensors);
  EXPECT_EQ(feed.layers().size(), dense.checkpoint.layers().size());

  const PushedModel split("llama-split");
  feed = split.feed_without_list();
  ASSERT_EQ(feed.layers().size(), 2U);
  EXPECT_FALSE(feed.is_complete(1));
  const PushedTensor& router = split.tensor("blk.0.ffn_gate_inp.weight");
  const std::vector<std::string> missing = feed.missing(1);
  ASSERT_EQ(missing.size(), 1U);
  const auto dims = router.shape.dims();
  EXPECT_EQ(missing[0],
            router.name + " [" + std::to_string(dims[0]) + ", " + std::to_string(dims[1]) + "]");
  // A MLP in the place of experts.
  EXPECT_FALSE(feed.put("blk.1.ffn_up.weight", router.view()));
  EXPECT_EQ(std::vector<int64_t>(feed.layers().begin(), feed.layers().end()),
            std::vector<int64_t>{0});
  const auto error = error_of([&] { feed.is_complete(1); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kLayerNotFound);
}

TEST(GgufFeed, NormOfProjections_WaitsForThem) {
  const PushedModel model("qwen3moe-q4_k_m");
  CheckpointFeed feed = model.feed_without_list();
  const int64_t hidden = model.tensor("blk.0.ffn_gate_inp.weight").shape[1];
  const Bytes ones(static_cast<size_t>(hidden) * sizeof(float));
  EXPECT_TRUE(feed.put("blk.0.ffn_routed_norm.weight",
                       GgufTensorView{.type = 0, .shape = {hidden}, .bytes = ones}));
  put_all(feed, model.tensors);
  const std::string size = std::to_string(hidden);
  const std::string dims = " [" + size + ", " + size + "]";
  EXPECT_EQ(feed.missing(), (std::vector<std::string>{"blk.0.ffn_routed_down.weight" + dims,
                                                      "blk.0.ffn_routed_up.weight" + dims}));
  EXPECT_FALSE(feed.is_complete(0));
}

TEST(GgufFeed, SourcesMadeBeforeALateTensor_StillReadWhatTheyRead) {
  const PushedModel model("deepseek2-q5_0");
  CheckpointFeed feed = model.feed_without_list();
  const auto is_bias = [](const PushedTensor& tensor) {
    return tensor.name.find("exp_probs_b") != std::string::npos;
  };
  for (const PushedTensor& tensor : model.tensors) {
    if (!is_bias(tensor)) feed.put(tensor.name, tensor.view());
  }
  const int64_t index = feed.layers().front();
  const auto early = feed.layer_source(index);
  for (const PushedTensor& tensor : model.tensors) {
    if (is_bias(tensor)) feed.put(tensor.name, tensor.view());
  }
  const auto late = feed.layer_source(index);
  EXPECT_EQ(early->describe(weights::kSelectionBias).count, 0);
  EXPECT_EQ(late->describe(weights::kSelectionBias).count, 1);
  for (int64_t expert = 0; expert < early->describe(weights::kDown).count; ++expert) {
    EXPECT_EQ(matrix_bytes(*early, weights::kDown, expert),
              matrix_bytes(*late, weights::kDown, expert));
  }
}

TEST(GgufFeed, SelectionBiasOfOneLayer_IsMissedInTheOthers) {
  const PushedModel model("deepseek2-q5_0");
  CheckpointFeed feed = model.feed_without_list();
  ASSERT_GE(feed.layers().size(), 2U);
  const auto is_bias = [](const PushedTensor& tensor) {
    return tensor.name.find("exp_probs_b") != std::string::npos;
  };
  for (const PushedTensor& tensor : model.tensors) {
    if (!is_bias(tensor)) feed.put(tensor.name, tensor.view());
  }
  EXPECT_TRUE(feed.missing().empty());
  const auto bias = std::ranges::find_if(model.tensors, is_bias);
  ASSERT_NE(bias, model.tensors.end());
  feed.put(bias->name, bias->view());
  EXPECT_EQ(feed.missing().size(), feed.layers().size() - 1);
  for (const PushedTensor& tensor : model.tensors) {
    if (is_bias(tensor) && tensor.name != bias->name) feed.put(tensor.name, tensor.view());
  }
  expect_layers_of(feed, model.checkpoint);
}

TEST(GgufFeed, ValuesAsTensorsOfThisLibrary_AreTaken) {
  const PushedModel model("qwen2moe-f16");
  const std::map<std::string_view, DType> plain = {
      {"F32", DType::kF32}, {"F16", DType::kF16}, {"BF16", DType::kBF16}};
  for (const bool says_stride : {false, true}) {
    CheckpointFeed feed = model.feed_without_list();
    for (const PushedTensor& tensor : model.tensors) {
      const auto dtype = plain.find(gguf_type_name(tensor.type));
      ASSERT_NE(dtype, plain.end()) << tensor.name;
      feed.put(tensor.name,
               {.data = tensor.bytes.data(),
                .dtype = dtype->second,
                .shape = tensor.shape,
                .row_stride = says_stride ? tensor.shape[tensor.shape.rank() - 1] : 0});
    }
    expect_layers_of(feed, model.checkpoint);
  }

  const std::string name = "blk.0.ffn_gate_inp.weight";
  const Bytes zeros(1024);
  const auto error = error_of([&] {
    model.feed_without_list().put(name,
                                  {.data = zeros.data(), .dtype = DType::kF8E4M3, .shape = {2, 4}});
  });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorDType);
  EXPECT_EQ(error->detail().tensor, name);
}

TEST(GgufFeed, StridedValues_AreCopiedDenseAndNotKept) {
  const PushedModel model("llama-q4_0");
  const std::string name = "blk.0.ffn_gate_inp.weight";
  const PushedTensor& router = model.tensor(name);
  const auto rows = static_cast<size_t>(router.shape[0]);
  const auto row_bytes = static_cast<size_t>(router.shape[1]) * 4;
  Bytes wide(rows * (row_bytes + 8));
  for (size_t row = 0; row < rows; ++row) {
    std::memcpy(&wide[row * (row_bytes + 8)], &router.bytes[row * row_bytes], row_bytes);
  }
  const ConstTensorView view{.data = wide.data(),
                             .dtype = DType::kF32,
                             .shape = router.shape,
                             .row_stride = router.shape[1] + 2};
  CheckpointFeed feed = model.feed_with_list();
  const auto error = error_of([&] { feed.put(name, view, FeedMemory::kKeep); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kStride);
  EXPECT_TRUE(feed.put(name, view));
  for (const PushedTensor& tensor : model.tensors) {
    if (tensor.name != name) feed.put(tensor.name, tensor.view());
  }
  expect_layers_of(feed, model.checkpoint);
}

TEST(GgufFeed, KeptMemory_IsReadInPlaceAndCopiesAreNot) {
  const PushedModel model("llama4-bf16");
  for (const FeedMemory memory : {FeedMemory::kKeep, FeedMemory::kCopy}) {
    CheckpointFeed feed = model.feed_with_list();
    put_all(feed, model.tensors, memory);
    const int64_t index = model.checkpoint.layers().front().index;
    const auto source = feed.layer_source(index);
    const Bytes& down =
        model.tensor("blk." + std::to_string(index) + ".ffn_down_exps.weight").bytes;
    const ConstTensorView view = source->view(weights::kDown, 0);
    ASSERT_FALSE(view.empty());
    EXPECT_EQ(view.data == down.data(), memory == FeedMemory::kKeep);
    EXPECT_NE(source->locate(weights::kDown, 1).find("ffn_down_exps.weight[1]"), std::string::npos);
  }
}

TEST(GgufTypes, NumbersAndNames_GiveEachOther) {
  for (uint32_t id = 0; id < 64; ++id) {
    std::string_view name;
    if (error_of([&] { name = gguf_type_name(id); })) continue;
    EXPECT_EQ(gguf_type_number(name), id);
  }
  EXPECT_EQ(gguf_type_number("Q4_K"), 12U);
  const auto removed = error_of([] { gguf_type_name(31); });
  ASSERT_TRUE(removed);
  EXPECT_EQ(removed->code(), ErrorCode::kGgufTensorType);
  EXPECT_EQ(removed->detail().found, "Q4_0_4_4 (31)");
  const auto error = error_of([] { gguf_type_number("Q4_X"); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kGgufTensorType);
}

}  // namespace
}  // namespace conclave::testing
