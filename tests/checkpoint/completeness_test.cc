// Whatever is wrong with the set of tensors, opening fails and names the tensor. Nothing is
// guessed.
#include "checkpoint/tiny_model.h"

#include "conclave/checkpoint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

namespace conclave::testing {
namespace {

// The MoE tensors of one layer, one per class.
std::vector<std::string> tensor_classes(const TinyModel& model) {
  std::vector<std::string> names;
  for (const TinyTensor& tensor : model.tensors) {
    const bool moe = tensor.name.find("layers.2.mlp.") != std::string::npos ||
                     tensor.name.find("layers.2.block_sparse_moe.") != std::string::npos;
    const bool later_expert = tensor.name.find("experts.") != std::string::npos &&
                              tensor.name.find("experts.3.") == std::string::npos &&
                              tensor.name.find("_proj.weight") != std::string::npos;
    const bool later_mixtral = tensor.name.find("block_sparse_moe.experts.") != std::string::npos &&
                               tensor.name.find("experts.3.") == std::string::npos;
    if (moe && !later_expert && !later_mixtral) names.push_back(tensor.name);
  }
  return names;
}

using Case = std::tuple<std::string, Layout>;
class Completeness : public ::testing::TestWithParam<Case> {
 protected:
  TinyModel model() const {
    return make_tiny_model({.family = std::get<0>(GetParam()), .layout = std::get<1>(GetParam())});
  }
  // Opens the model as one file and as two shards; both must fail with `code` and name the tensor.
  static void expect_error(const TinyModel& model, ErrorCode code, const std::string& tensor) {
    for (bool sharded : {false, true}) {
      const TempDir directory;
      sharded ? write_sharded(model, directory.path(), 2) : write_single(model, directory.path());
      const auto error = open_error(directory.path());
      ASSERT_TRUE(error) << "opened in silence: " << tensor;
      EXPECT_EQ(error->code(), code) << error->what();
      EXPECT_NE(std::string(error->what()).find(tensor), std::string::npos) << error->what();
      EXPECT_FALSE(error->detail().file.empty()) << error->what();
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Families, Completeness,
                         ::testing::Combine(::testing::ValuesIn(kFamilies),
                                            ::testing::Values(Layout::kPerExpert, Layout::kStacked,
                                                              Layout::kStackedTransposed)),
                         [](const auto& test) {
                           return std::get<0>(test.param) +
                                  std::to_string(static_cast<int>(std::get<1>(test.param)));
                         });

TEST_P(Completeness, TensorClasses_AreAllCovered) {
  const size_t shared = std::get<0>(GetParam()) == "qwen2_moe" ? 4 : 0;
  const size_t experts = std::get<1>(GetParam()) == Layout::kPerExpert ? 3 : 2;
  EXPECT_EQ(tensor_classes(model()).size(), 1 + experts + shared);
}

TEST_P(Completeness, DroppedTensor_IsNamed) {
  for (const std::string& name : tensor_classes(model())) {
    TinyModel broken = model();
    broken.drop(name);
    expect_error(broken, ErrorCode::kTensorMissing, name);
  }
}

TEST_P(Completeness, RenamedTensor_IsNamedMissingWithTheStray) {
  for (const std::string& name : tensor_classes(model())) {
    TinyModel broken = model();
    broken.at(name).name = name + "x";
    expect_error(broken, ErrorCode::kTensorMissing, name);
    expect_error(broken, ErrorCode::kTensorMissing, name + "x");
  }
}

TEST_P(Completeness, AdditionalTensor_IsNamed) {
  for (const std::string& name : tensor_classes(model())) {
    TinyModel broken = model();
    const TinyTensor copy = broken.at(name);
    broken.add(name + ".extra", copy.dtype, copy.shape);
    expect_error(broken, ErrorCode::kTensorUnexpected, name + ".extra");
    expect_error(broken, ErrorCode::kTensorUnexpected, "nearest known name: " + name);
  }
}

TEST_P(Completeness, WrongShape_IsNamed) {
  for (const std::string& name : tensor_classes(model())) {
    TinyModel broken = model();
    TinyTensor wider = broken.at(name);
    broken.drop(name);
    wider.shape.back() += 1;
    broken.add(name, wider.dtype, wider.shape);
    expect_error(broken, ErrorCode::kTensorShape, name);
  }
}

TEST_P(Completeness, SwappedTensorsOfDifferentShape_AreNamed) {
  const std::vector<std::string> names = tensor_classes(model());
  for (size_t a = 0; a < names.size(); ++a) {
    for (size_t b = a + 1; b < names.size(); ++b) {
      TinyModel broken = model();
      if (broken.at(names[a]).shape == broken.at(names[b]).shape) continue;
      TinyTensor& first = broken.at(names[a]);
      TinyTensor& second = broken.at(names[b]);
      std::swap(first.name, second.name);
      expect_error(broken, ErrorCode::kTensorShape, "layers.2.");
    }
  }
}

TEST_P(Completeness, OtherType_IsRejectedOrReportedPerRole) {
  TinyModel broken = model();
  const std::vector<std::string> names = tensor_classes(broken);
  const auto down = std::find_if(names.begin(), names.end(), [](const std::string& name) {
    return name.find("experts.") != std::string::npos &&
           (name.find("down_proj") != std::string::npos || name.find("w2") != std::string::npos);
  });
  const std::vector<int64_t> shape = broken.at(*down).shape;
  broken.drop(*down);
  broken.add(*down, DType::kF32, shape);
  expect_error(broken, ErrorCode::kTensorDType, *down);
}

TEST(TensorSet, BothLayoutsPresent_AreDuplicates) {
  for (const std::string& family : kFamilies) {
    TinyModel both = make_tiny_model({.family = family});
    const TinyModel stacked = make_tiny_model({.family = family, .layout = Layout::kStacked});
    for (const TinyTensor& tensor : stacked.tensors) {
      if (tensor.name.find("layers.0.mlp.experts.") != std::string::npos) {
        both.tensors.push_back(tensor);
      }
    }
    const TempDir directory;
    write_single(both, directory.path());
    const auto error = open_error(directory.path());
    ASSERT_TRUE(error) << family;
    EXPECT_EQ(error->code(), ErrorCode::kTensorDuplicate) << error->what();
  }
}

TEST(TensorSet, LeadingZerosInLayer_AreUnexpected) {
  TinyModel model = make_tiny_model({});
  model.add("model.layers.00.mlp.gate.weight", DType::kBF16, {5, 10});
  const TempDir directory;
  write_single(model, directory.path());
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorUnexpected) << error->what();
}

TEST(TensorSet, ExpertBeyondConfig_IsUnexpected) {
  TinyModel model = make_tiny_model({});
  model.add("model.layers.0.mlp.experts.5.gate_proj.weight", DType::kBF16, {6, 10});
  const TempDir directory;
  write_single(model, directory.path());
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorUnexpected) << error->what();
  EXPECT_EQ(error->detail().limit, "5 experts, 0 to 4");
}

TEST(TensorSet, ExpertsUnderASecondTrunk_AreUnexpected) {
  TinyModel model = make_tiny_model({});
  model.add("other.layers.0.mlp.experts.0.gate_proj.weight", DType::kBF16, {6, 10});
  const TempDir directory;
  write_single(model, directory.path());
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorUnexpected) << error->what();
}

TEST(TensorSet, ExpertsInADenseLayer_AreUnexpected) {
  TinyModel model = make_tiny_model({});
  model.config["mlp_only_layers"] = {1, 2};
  const TempDir directory;
  write_single(model, directory.path());
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorUnexpected) << error->what();
}

TEST(TensorSet, RouterInADenseLayer_IsUnexpected) {
  TinyModel model = make_tiny_model({});
  model.add("model.layers.1.mlp.gate.weight", DType::kBF16, {5, 10});
  const TempDir directory;
  write_single(model, directory.path());
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorUnexpected) << error->what();
}

TEST(TensorSet, ConfigWithMoreExperts_ListsTheFirstTenAndCountsTheRest) {
  TinyModel model = make_tiny_model({});
  model.config["num_experts"] = 12;
  for (TinyTensor& tensor : model.tensors) {
    if (!tensor.name.ends_with("mlp.gate.weight")) continue;
    tensor.shape[0] = 12;
    tensor.bytes.resize(12 * 10 * 2);
  }
  const TempDir directory;
  write_single(model, directory.path());
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorMissing) << error->what();
  EXPECT_NE(error->detail().what.find("41 more"), std::string::npos) << error->what();
  EXPECT_NE(error->detail().expected.find("and 32 more"), std::string::npos) << error->what();
}

TEST(TensorSet, ModelWithoutAnyExpert_NamesWhatIsMissing) {
  TinyModel model = make_tiny_model({});
  std::erase_if(model.tensors, [](const TinyTensor& tensor) {
    return tensor.name.find("mlp.") != std::string::npos;
  });
  const TempDir directory;
  write_single(model, directory.path());
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorMissing) << error->what();
  EXPECT_EQ(error->detail().tensor, "model.layers.0.mlp.gate.weight");
}

TEST(TensorSet, QuantisedModel_OpensButDoesNotRun) {
  TinyModel model = make_tiny_model({});
  model.config["quantization_config"] = {{"quant_method", "aqlm"}};
  model.at("model.layers.0.mlp.experts.0.gate_proj.weight").name =
      "model.layers.0.mlp.experts.0.gate_proj.qweight";
  const TempDir directory;
  write_single(model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  ASSERT_EQ(checkpoint.layers().size(), 2U);
  EXPECT_FALSE(checkpoint.layers()[0].support);
  EXPECT_NE(checkpoint.layers()[0].support.reason().find("aqlm"), std::string::npos);
  EXPECT_GT(checkpoint.layers()[0].bytes, 0U);
  const auto error = error_of([&] { checkpoint.layer_source(0); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kUnsupportedQuantization);
}

// A model can be inspected whatever its configuration requires of a layer.
TEST(TensorSet, SpecThatDoesNotRun_OpensWithTheReasonOfEachLayer) {
  TinyModel model = make_tiny_model({.family = "mixtral"});
  model.config["model_type"] = "phimoe";
  model.config["num_experts_per_tok"] = 3;
  const TempDir directory;
  write_single(model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  ASSERT_EQ(checkpoint.layers().size(), 3U);
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    EXPECT_EQ(layer.support.reason(),
              "num_experts_per_tok does not fit router sparse_mixer: 3 (limit: 2)");
    EXPECT_GT(layer.parameters.total, 0);
    EXPECT_NO_THROW(read_matrix(*checkpoint.layer_source(layer.index), weights::kUp, 4));
  }
}

TEST(TensorSet, FloatEightWithoutConfig_IsUnsupportedWithReason) {
  TinyModel model = make_tiny_model({});
  for (TinyTensor& tensor : model.tensors) {
    if (tensor.name.find(".experts.") == std::string::npos) continue;
    tensor.dtype = DType::kF8E4M3;
    tensor.bytes.resize(tensor.bytes.size() / 2);
  }
  const TempDir directory;
  write_single(model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  EXPECT_NE(checkpoint.layers()[0].support.reason().find("F8_E4M3"), std::string::npos);
}

TEST(TensorSet, SharedExpertOfAnotherType_IsUnsupportedWithReason) {
  TinyModel model = make_tiny_model({.family = "qwen2_moe"});
  for (TinyTensor& tensor : model.tensors) {
    if (tensor.name.find(".shared_expert.") == std::string::npos) continue;
    tensor.dtype = DType::kF32;
    tensor.bytes.resize(tensor.bytes.size() * 2);
  }
  const TempDir directory;
  write_single(model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  EXPECT_EQ(checkpoint.layers()[0].support.reason(),
            "the shared expert is stored as F32, the routed experts as BF16");
}

TEST(CheckpointLayers, UnknownLayer_ListsTheLayersThereAre) {
  const TempDir directory;
  write_single(make_tiny_model({}), directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  EXPECT_EQ(checkpoint.layer(2).index, 2);
  const auto beyond = error_of([&] { checkpoint.layer(99); });
  ASSERT_TRUE(beyond);
  EXPECT_EQ(beyond->code(), ErrorCode::kLayerNotFound);
  EXPECT_EQ(beyond->detail().expected, "one of its MoE layers 0, 2");
  EXPECT_EQ(beyond->detail().found, "99");
  const auto dense = error_of([&] { checkpoint.layer_source(1); });
  ASSERT_TRUE(dense);
  EXPECT_EQ(dense->code(), ErrorCode::kLayerNotFound);
  EXPECT_NE(std::string(dense->what()).find("dense"), std::string::npos);
}

}  // namespace
}  // namespace conclave::testing
