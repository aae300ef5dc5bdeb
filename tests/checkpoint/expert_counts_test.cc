// Pruned models: layers with different numbers of experts.

#include "checkpoint/tiny_model.h"

#include "conclave/checkpoint.h"
#include "conclave/context.h"
#include "conclave/layer.h"
#include "conclave/reference.h"
#include "conclave/synthetic.h"
#include "conclave/tensor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

constexpr int64_t kExperts = 5;
constexpr int64_t kPruned = 3;  // what layer 0 is left with

std::vector<std::byte> random_bf16(size_t count, std::mt19937& random) {
  Tensor values(DType::kF32, {1, static_cast<int64_t>(count)});
  std::normal_distribution<float> normal(0, 0.5F);
  for (size_t i = 0; i < count; ++i) values.as<float>()[i] = normal(random);
  Tensor rounded(DType::kBF16, values.shape());
  convert(values.const_view(), rounded.view());
  const auto* const bytes = rounded.as<std::byte>();
  return {bytes, bytes + rounded.size_bytes()};
}

// Layer 0 has fewer experts than the others; all weights are random.
TinyModel pruned_model(Layout layout) {
  TinyModel model = make_tiny_model({.family = "qwen3_moe", .layout = layout});
  const std::string start = "model.layers.0.mlp.";
  for (int64_t expert = kPruned; expert < kExperts; ++expert) {
    const std::string name = start + "experts." + std::to_string(expert) + ".";
    std::erase_if(model.tensors,
                  [&](const TinyTensor& tensor) { return tensor.name.starts_with(name); });
  }
  std::mt19937 random(7);
  for (TinyTensor& tensor : model.tensors) {
    const bool is_router = tensor.name == start + "gate.weight";
    const bool is_stack = tensor.name.starts_with(start) && tensor.shape.size() == 3;
    if (is_router || is_stack) tensor.shape[0] = kPruned;
    size_t count = 1;
    for (const int64_t size : tensor.shape) count *= static_cast<size_t>(size);
    tensor.bytes = random_bf16(count, random);
  }
  return model;
}

void expect_layers_run(const Checkpoint& checkpoint) {
  const Context context({.num_threads = 1});
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    const MoeSpec& spec = layer.spec;
    EXPECT_EQ(spec.num_experts, layer.index == 0 ? kPruned : kExperts);
    const auto source = checkpoint.layer_source(layer.index);
    const MoeLayer moe_layer = MoeLayer::create(context, spec, *source);
    Tensor hidden(DType::kBF16, {11, spec.hidden_size});
    fill_random(hidden.view(), 3);
    Tensor out(DType::kF32, {11, spec.hidden_size});
    moe_layer.forward({.hidden = hidden.view(), .out = out.view()});
    const ReferenceResult expected =
        reference_forward(context, spec, *source, {.hidden = hidden.view()});
    double error = 0;
    double length = 0;
    for (size_t i = 0; i < expected.output.size(); ++i) {
      error += std::pow(expected.output[i] - double{out.as<float>()[i]}, 2);
      length += expected.output[i] * expected.output[i];
    }
    EXPECT_GT(length, 0);
    EXPECT_LE(std::sqrt(error / length), 6e-3) << "layer " << layer.index;
  }
}

bool has_note(const Checkpoint& checkpoint) {
  return std::ranges::any_of(checkpoint.notes(), [](const std::string& note) {
    return note.find("as many experts as their routers") != std::string::npos;
  });
}

TEST(ExpertCounts, AListOfTheConfiguration_IsByLayer) {
  TinyModel model = pruned_model(Layout::kPerExpert);
  model.config["num_experts"] = {kPruned, kExperts, kExperts};
  const TempDir directory;
  write_single(model, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  expect_layers_run(checkpoint);
  EXPECT_FALSE(has_note(checkpoint));
  model.config["num_experts"] = {kPruned, kExperts};
  const TempDir shorter;
  write_single(model, shorter.path());
  const auto error = open_error(shorter.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kConfigValue);
}

TEST(ExpertCounts, RoutersThatDiffer_SayTheirLayers) {
  for (const Layout layout : {Layout::kPerExpert, Layout::kStacked}) {
    const TempDir directory;
    write_single(pruned_model(layout), directory.path());
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    expect_layers_run(checkpoint);
    EXPECT_TRUE(has_note(checkpoint));
  }
}

TEST(ExpertCounts, FewerThanATokenChooses_AreNamed) {
  TinyModel model = pruned_model(Layout::kPerExpert);
  model.config["num_experts_per_tok"] = kPruned + 1;
  const TempDir directory;
  write_single(model, directory.path());
  const auto error = open_error(directory.path());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorShape) << error->what();
  EXPECT_EQ(error->detail().tensor, "model.layers.0.mlp.gate.weight");
}

// A router without its experts, or experts without their rows, are faults of the file.
TEST(ExpertCounts, RoutersAndExpertsThatDisagree_AreFaults) {
  TinyModel missing = pruned_model(Layout::kPerExpert);
  missing.drop("model.layers.0.mlp.experts.2.up_proj.weight");
  missing.drop("model.layers.0.mlp.experts.2.gate_proj.weight");
  missing.drop("model.layers.0.mlp.experts.2.down_proj.weight");
  const TempDir directory;
  write_single(missing, directory.path());
  EXPECT_TRUE(open_error(directory.path()));
}

TEST(ExpertCounts, OneNumberInAllLayers_IsNotTheConfigurations) {
  TinyModel model = make_tiny_model({.family = "qwen3_moe"});
  model.config["num_experts"] = kExperts + 1;
  const TempDir directory;
  write_single(model, directory.path());
  EXPECT_TRUE(open_error(directory.path()));
}

}  // namespace
}  // namespace conclave::testing
