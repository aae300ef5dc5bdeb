// Every layout of every family gives the same matrices.
#include "checkpoint/tiny_model.h"

#include "conclave/checkpoint.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace conclave::testing {
namespace {

constexpr WeightId kExpertRoles[] = {weights::kGate, weights::kUp, weights::kDown};
constexpr WeightId kOnceRoles[] = {weights::kRouter, weights::kSharedGate, weights::kSharedUp,
                                   weights::kSharedDown, weights::kSharedExpertGate};

std::string name_of(Layout layout) {
  switch (layout) {
    case Layout::kPerExpert:
      return "per_expert";
    case Layout::kStacked:
      return "stacked";
    case Layout::kStackedTransposed:
      return "stacked_transposed";
  }
  return "";
}

void expect_matrices(const Checkpoint& checkpoint, const TinyOptions& options) {
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    const auto source = checkpoint.layer_source(layer.index);
    for (WeightId role : kExpertRoles) {
      const WeightInfo info = source->describe(role);
      ASSERT_EQ(info.count, options.num_experts);
      EXPECT_EQ(info.dtype, options.dtype);
      for (int64_t expert = 0; expert < info.count; ++expert) {
        EXPECT_EQ(read_matrix(*source, role, expert),
                  tiny_matrix(options.dtype, layer.index, role, expert, info.rows, info.cols))
            << to_string(role) << " of expert " << expert << ", layer " << layer.index;
      }
    }
    for (WeightId role : kOnceRoles) {
      const WeightInfo info = source->describe(role);
      const bool present = role == weights::kRouter || options.family == "qwen2_moe";
      ASSERT_EQ(info.count, present ? 1 : 0) << to_string(role);
      if (!present) continue;
      EXPECT_EQ(read_matrix(*source, role, 0),
                tiny_matrix(options.dtype, layer.index, role, 0, info.rows, info.cols))
          << to_string(role);
    }
  }
}

using Case = std::tuple<std::string, Layout, DType, FileAccess>;
class EveryLayout : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Families, EveryLayout,
                         ::testing::Combine(::testing::ValuesIn(kFamilies),
                                            ::testing::Values(Layout::kPerExpert, Layout::kStacked,
                                                              Layout::kStackedTransposed),
                                            ::testing::Values(DType::kBF16, DType::kF32),
                                            ::testing::Values(FileAccess::kMap, FileAccess::kRead)),
                         [](const auto& test) {
                           return std::get<0>(test.param) + "_" + name_of(std::get<1>(test.param)) +
                                  "_" + std::string(to_string(std::get<2>(test.param))) +
                                  (std::get<3>(test.param) == FileAccess::kMap ? "_map" : "_read");
                         });

TEST_P(EveryLayout, Opened_HoldsEveryMatrix) {
  const auto& [family, layout, dtype, access] = GetParam();
  const TinyOptions options{.family = family, .layout = layout, .dtype = dtype};
  const TinyModel model = make_tiny_model(options);
  const TempDir single;
  const TempDir sharded;
  write_single(model, single.path());
  write_sharded(model, sharded.path(), 3);
  for (const TempDir* directory : {&single, &sharded}) {
    const Checkpoint checkpoint = Checkpoint::open(directory->path(), {.access = access});
    EXPECT_EQ(checkpoint.model_type(), family);
    EXPECT_EQ(checkpoint.architecture(), family);
    EXPECT_EQ(checkpoint.num_hidden_layers(), 3);
    ASSERT_EQ(checkpoint.layers().size(), model.moe_layers.size());
    for (size_t i = 0; i < model.moe_layers.size(); ++i) {
      const CheckpointLayer& layer = checkpoint.layers()[i];
      EXPECT_EQ(layer.index, model.moe_layers[i]);
      EXPECT_EQ(layer.layout, name_of(layout));
      EXPECT_EQ(layer.spec.weight_dtype, dtype);
      EXPECT_TRUE(layer.support) << layer.support.reason();
      EXPECT_EQ(layer.bytes, static_cast<uint64_t>(layer.parameters.total * byte_size(dtype)));
    }
    expect_matrices(checkpoint, options);
  }
}

TEST(Layouts, AmbiguousShapes_AreDecidedByTheOtherTensor) {
  // 2 I = H makes gate_up ambiguous, I = H makes down ambiguous; never both at once.
  for (const auto& [hidden, intermediate] : {std::pair<int64_t, int64_t>{12, 6}, {8, 8}}) {
    for (Layout layout : {Layout::kStacked, Layout::kStackedTransposed}) {
      const TinyOptions options{
          .layout = layout, .hidden_size = hidden, .intermediate_size = intermediate};
      const TempDir directory;
      write_single(make_tiny_model(options), directory.path());
      const Checkpoint checkpoint = Checkpoint::open(directory.path());
      EXPECT_EQ(checkpoint.layers()[0].layout, name_of(layout));
      expect_matrices(checkpoint, options);
    }
  }
}

TEST(Layouts, Trunks_AreInferred) {
  for (const char* trunk :
       {"model.", "model.language_model.", "language_model.model.", "", "some.other.trunk."}) {
    const TinyOptions options{.trunk = trunk};
    const TempDir directory;
    write_single(make_tiny_model(options), directory.path());
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    EXPECT_EQ(checkpoint.layers()[0].prefix, std::string(trunk) + "layers.0.mlp.");
    expect_matrices(checkpoint, options);
  }
}

TEST(Layouts, PartsThatAreNotRead_AreNoted) {
  TinyModel model = make_tiny_model({});
  model.add("mtp.layers.0.mlp.experts.0.gate_proj.weight", DType::kBF16, {6, 10});
  model.add("model.layers.3.mlp.experts.0.gate_proj.weight", DType::kBF16, {6, 10});
  model.add("model.layers.3.eh_proj.weight", DType::kBF16, {6, 10});
  model.add("model.mystery", DType::kBF16, {1});
  const TempDir directory;
  write_single(model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  std::string notes;
  for (const std::string& note : checkpoint.notes()) notes += note + "\n";
  EXPECT_NE(notes.find("1 tensors of a multi-token-prediction head"), std::string::npos) << notes;
  EXPECT_NE(notes.find("2 tensors of layers from num_hidden_layers = 3"), std::string::npos)
      << notes;
  EXPECT_NE(notes.find("model.mystery"), std::string::npos) << notes;
}

TEST(Layouts, CleanModel_HasNoNotes) {
  TinyModel model = make_tiny_model({});
  model.config["torch_dtype"] = "bfloat16";
  const TempDir directory;
  write_single(model, directory.path());
  EXPECT_TRUE(Checkpoint::open(directory.path()).notes().empty());
}

TEST(LayerSource, AnyBlock_EqualsThePartOfTheMatrix) {
  for (Layout layout : {Layout::kPerExpert, Layout::kStacked, Layout::kStackedTransposed}) {
    for (DType dtype : {DType::kF16, DType::kF32}) {
      const TinyOptions options{.layout = layout, .dtype = dtype};
      const TempDir directory;
      write_single(make_tiny_model(options), directory.path());
      const Checkpoint checkpoint = Checkpoint::open(directory.path());
      const auto source = checkpoint.layer_source(0);
      const auto element = static_cast<size_t>(byte_size(dtype));
      for (WeightId role : {weights::kUp, weights::kDown}) {
        const WeightInfo info = source->describe(role);
        const auto whole = read_matrix(*source, role, 3);
        for (const WeightBlock& block :
             {WeightBlock{0, info.rows, 2, 5}, WeightBlock{1, 4, 0, info.cols},
              WeightBlock{2, 3, 3, 4},
              WeightBlock{info.rows - 1, info.rows, info.cols - 1, info.cols},
              WeightBlock{0, 0, 0, info.cols}, WeightBlock{2, 5, 4, 4}}) {
          std::vector<std::byte> expected;
          for (int64_t row = block.row_begin; row < block.row_end; ++row) {
            const std::byte* line = whole.data() + static_cast<size_t>(row * info.cols) * element;
            expected.insert(expected.end(), line + static_cast<size_t>(block.col_begin) * element,
                            line + static_cast<size_t>(block.col_end) * element);
          }
          std::vector<std::byte> found(expected.size());
          source->read(role, 3, block, found);
          EXPECT_EQ(found, expected) << to_string(role);
        }
      }
    }
  }
}

TEST(LayerSource, Views_AreGivenWhereTheFileHoldsTheMatrixAsItIs) {
  for (Layout layout : {Layout::kPerExpert, Layout::kStacked, Layout::kStackedTransposed}) {
    const TempDir directory;
    write_single(make_tiny_model({.layout = layout}), directory.path());
    const Checkpoint mapped = Checkpoint::open(directory.path(), {.access = FileAccess::kMap});
    const auto source = mapped.layer_source(0);
    for (WeightId role : kExpertRoles) {
      const ConstTensorView view = source->view(role, 2);
      if (layout == Layout::kStackedTransposed) {
        EXPECT_TRUE(view.empty());
        continue;
      }
      ASSERT_FALSE(view.empty()) << to_string(role);
      const auto expected = read_matrix(*source, role, 2);
      EXPECT_EQ(std::memcmp(view.data, expected.data(), expected.size()), 0);
    }
    const Checkpoint read = Checkpoint::open(directory.path(), {.access = FileAccess::kRead});
    EXPECT_TRUE(read.layer_source(0)->view(weights::kGate, 2).empty());
  }
}

TEST(LayerSource, BadArguments_AreRejected) {
  const TempDir directory;
  write_single(make_tiny_model({}), directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  const auto source = checkpoint.layer_source(0);
  std::vector<std::byte> buffer(6 * 10 * 2);
  const auto code_of = [&](WeightId role, int64_t expert, WeightBlock block, size_t bytes) {
    const auto error =
        error_of([&] { source->read(role, expert, block, std::span(buffer).first(bytes)); });
    return error ? error->code() : ErrorCode::kInternal;
  };
  EXPECT_EQ(code_of(weights::kGate, 5, {0, 6, 0, 10}, 120), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(weights::kGate, -1, {0, 6, 0, 10}, 120), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(weights::kSharedUp, 0, {0, 1, 0, 1}, 2), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(weights::kGate, 0, {0, 7, 0, 10}, 120), ErrorCode::kShape);
  EXPECT_EQ(code_of(weights::kGate, 0, {0, 6, -1, 10}, 120), ErrorCode::kShape);
  EXPECT_EQ(code_of(weights::kGate, 0, {4, 2, 0, 10}, 120), ErrorCode::kShape);
  EXPECT_EQ(code_of(weights::kGate, 0, {0, 6, 0, 10}, 118), ErrorCode::kShape);
}

TEST(LayerSource, Locate_NamesFileTensorAndSlice) {
  const TempDir directory;
  write_single(make_tiny_model({.layout = Layout::kStacked}), directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  EXPECT_EQ(checkpoint.layer_source(0)->locate(weights::kUp, 4),
            "model.safetensors: model.layers.0.mlp.experts.gate_up_proj[4]");
  EXPECT_EQ(checkpoint.layer_source(2)->locate(weights::kRouter, 0),
            "model.safetensors: model.layers.2.mlp.gate.weight");
}

TEST(LayerSource, ManyThreads_ReadTheSame) {
  const TinyOptions options{.layout = Layout::kStackedTransposed};
  const TempDir directory;
  write_single(make_tiny_model(options), directory.path());
  Checkpoint::write_manifest(directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path(), {.verify_manifest = true});
  const auto source = checkpoint.layer_source(0);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int64_t expert = 0; expert < options.num_experts; ++expert) {
        const auto expected = tiny_matrix(options.dtype, 0, weights::kDown, expert, 10, 6);
        if (read_matrix(*source, weights::kDown, expert) != expected) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace conclave::testing
