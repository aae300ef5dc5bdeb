// Weights of memory and of feeds, dense and quantised, against the same weights in C++.
#include "capi/handles.h"
#include "capi/spec_json.h"
#include "support/layer_fixture.h"

#include "conclave/checkpoint.h"
#include "conclave/safetensors.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::expect_error;
using testing::Handle;
using testing::make;
using testing::make_context;
using testing::make_spec;
using testing::random_tensor;
using testing::same_bits;
using testing::sized;
using testing::tensor_of;

constexpr int64_t kExperts = 6, kHidden = 64, kIntermediate = 32, kTokens = 5;

MoeSpec quantised_spec() {
  MoeSpec spec = make_spec(kExperts, 2, kHidden, kIntermediate, DType::kI8);
  spec.quant.weights = WeightScale::kChannel;
  return spec;
}

// Tensors of a layer by the names of ExpertWeights.
struct Weights {
  explicit Weights(const MoeSpec& of) : spec(of) {
    add("gate_up", of.weight_dtype, {kExperts, 2 * kIntermediate, kHidden});
    add("down", of.weight_dtype, {kExperts, kHidden, kIntermediate});
    add("router", DType::kF32, {kExperts, kHidden});
    if (of.quant.weights == WeightScale::kNone) return;
    add("gate_up_scale", DType::kF32, {kExperts, 2 * kIntermediate, 1});
    add("down_scale", DType::kF32, {kExperts, kHidden, 1});
  }

  void add(const char* name, DType dtype, const Shape& shape) {
    Tensor& tensor = tensors.emplace(name, Tensor(dtype, shape)).first->second;
    if (dtype == DType::kI8) {
      for (size_t i = 0; i < tensor.size_bytes(); ++i) {
        tensor.as<int8_t>()[i] = static_cast<int8_t>(i * 37 % 255 - 127);
      }
      return;
    }
    fill_random(
        {tensor.as<std::byte>(), dtype, {tensor.shape().num_elements() / shape[1], shape[1]}},
        tensors.size());
    if (std::string_view(name).ends_with("scale")) {
      for (size_t i = 0; i < tensor.size_bytes() / 4; ++i) {
        tensor.as<float>()[i] = 0.001F * static_cast<float>(1 + i % 9);
      }
    }
  }

  ConstTensorView at(const char* name) const {
    const auto found = tensors.find(name);
    return found == tensors.end() ? ConstTensorView{} : found->second.const_view();
  }
  ExpertWeights cpp() const {
    return {.gate_up = at("gate_up"),
            .down = at("down"),
            .router = at("router"),
            .gate_up_scale = at("gate_up_scale"),
            .down_scale = at("down_scale")};
  }

  MoeSpec spec;
  std::map<std::string, Tensor> tensors;
};

// The same as the C interface takes it.
struct NamedWeights {
  explicit NamedWeights(const Weights& weights) {
    views.reserve(weights.tensors.size() + 2);
    for (const auto& [name, tensor] : weights.tensors) add(name.c_str(), tensor.const_view());
  }
  void add(const char* name, const ConstTensorView& view) {
    views.push_back(tensor_of(view));
    named.push_back({.name = name, .tensor = &views.back()});
  }
  std::vector<conclave_tensor> views;
  std::vector<conclave_named_tensor> named;
};

Handle<conclave_spec> spec_handle(const MoeSpec& spec) {
  return make<conclave_spec>(&conclave_spec_from_json, capi::json_of_spec(spec).dump().c_str());
}

Tensor run_cpp(const MoeSpec& spec, const WeightSource& source, const Tensor& hidden) {
  const Context context(ContextOptions{.num_threads = 2});
  const MoeLayer layer = MoeLayer::create(context, spec, source, {.max_tokens = 16});
  Tensor out(DType::kF32, {hidden.shape()[0], spec.hidden_size});
  layer.forward({.hidden = hidden.const_view(), .out = out.view()});
  return out;
}

Tensor run_c(const conclave_layer* layer, const Tensor& hidden) {
  Tensor out(DType::kF32, {hidden.shape()[0], hidden.shape()[1]});
  const conclave_tensor in = tensor_of(hidden.const_view());
  const conclave_tensor written = tensor_of(out.const_view());
  auto args = sized<conclave_forward_args>();
  args.hidden = &in;
  args.out = &written;
  EXPECT_EQ(conclave_layer_forward(layer, &args), CONCLAVE_OK) << conclave_last_error_message();
  return out;
}

Handle<conclave_layer> create(const conclave_spec* spec, const conclave_source* source,
                              const conclave_layer_options* options = nullptr) {
  const auto context = make_context();
  auto few = sized<conclave_layer_options>();
  few.max_tokens = 16;
  return make<conclave_layer>(&conclave_layer_create, context.get(), spec, source,
                              options == nullptr ? &few : options, nullptr);
}

class Memory : public ::testing::TestWithParam<MoeSpec> {};

TEST_P(Memory, Layers_HaveTheBitsOfCpp) {
  const Weights weights(GetParam());
  const NamedWeights named(weights);
  const auto source = make<conclave_source>(&conclave_source_from_tensors, named.named.data(),
                                            named.named.size(), nullptr);
  const auto spec = spec_handle(weights.spec);
  const auto layer = create(spec.get(), source.get());
  const Tensor hidden = random_tensor(DType::kBF16, kTokens, kHidden, 7);
  EXPECT_TRUE(same_bits(run_c(layer.get(), hidden),
                        run_cpp(weights.spec, *make_pointer_source(weights.cpp()), hidden)));

  // Other weights of the same shapes, in the same layer.
  Weights others(GetParam());
  std::swap(others.tensors.at("gate_up").as<std::byte>()[1],
            others.tensors.at("gate_up").as<std::byte>()[9]);
  const NamedWeights other_names(others);
  const auto other = make<conclave_source>(&conclave_source_from_tensors, other_names.named.data(),
                                           other_names.named.size(), nullptr);
  ASSERT_EQ(conclave_layer_reload(layer.get(), other.get(), CONCLAVE_RELOAD_MODE_IN_PLACE),
            CONCLAVE_OK);
  EXPECT_TRUE(same_bits(run_c(layer.get(), hidden),
                        run_cpp(others.spec, *make_pointer_source(others.cpp()), hidden)));
}

INSTANTIATE_TEST_SUITE_P(
    Types, Memory,
    ::testing::Values(make_spec(kExperts, 2, kHidden, kIntermediate, DType::kF32),
                      make_spec(kExperts, 2, kHidden, kIntermediate, DType::kF16),
                      make_spec(kExperts, 2, kHidden, kIntermediate, DType::kBF16),
                      quantised_spec()));

TEST(MemoryInPlace, TheLayerHoldsItsSource) {
  const Weights weights(make_spec(kExperts, 2, kHidden, kIntermediate, DType::kF32));
  const NamedWeights named(weights);
  auto source = make<conclave_source>(&conclave_source_from_tensors, named.named.data(),
                                      named.named.size(), nullptr);
  const auto spec = spec_handle(weights.spec);
  auto options = sized<conclave_layer_options>();
  options.weights = CONCLAVE_WEIGHT_USE_IN_PLACE;
  options.max_tokens = 16;
  const auto layer = create(spec.get(), source.get(), &options);
  source.reset();
  auto stats = sized<conclave_layer_stats>();
  ASSERT_EQ(conclave_layer_get_stats(layer.get(), &stats), CONCLAVE_OK);
  EXPECT_GT(stats.in_place_bytes, 0U);
  const Tensor hidden = random_tensor(DType::kF32, kTokens, kHidden, 7);
  EXPECT_TRUE(same_bits(run_c(layer.get(), hidden),
                        run_cpp(weights.spec, *make_pointer_source(weights.cpp()), hidden)));
}

TEST(Memory, WhatIsWrongWithTensors_IsNamed) {
  const Weights weights(make_spec(kExperts, 2, kHidden, kIntermediate, DType::kF32));
  conclave_source* out = nullptr;
  const auto expect = [&](NamedWeights& named, conclave_status status, const char* names) {
    expect_error(
        conclave_source_from_tensors(named.named.data(), named.named.size(), nullptr, &out), status,
        names);
    EXPECT_EQ(out, nullptr);
  };
  NamedWeights unknown(weights);
  unknown.add("gate_upp", weights.at("router"));
  expect(unknown, CONCLAVE_ERROR_UNKNOWN_NAME, "gate_upp");
  NamedWeights twice(weights);
  twice.add("router", weights.at("router"));
  expect(twice, CONCLAVE_ERROR_TENSOR_DUPLICATE, "router");
  NamedWeights nameless(weights);
  nameless.named[1].name = nullptr;
  expect(nameless, CONCLAVE_ERROR_NULL_POINTER, "tensors[1].name");
  NamedWeights nothing(weights);
  nothing.named[0].tensor = nullptr;
  expect(nothing, CONCLAVE_ERROR_NULL_POINTER, "down");
  NamedWeights flat(weights);
  flat.views[1].rank = 2;
  expect(flat, CONCLAVE_ERROR_SHAPE, "gate_up");
  NamedWeights apart(weights);
  apart.views[0].row_stride = 100;
  expect(apart, CONCLAVE_ERROR_STRIDE, "down");
  NamedWeights crooked(weights);
  crooked.views[1].data = static_cast<char*>(crooked.views[1].data) + 1;
  expect(crooked, CONCLAVE_ERROR_MISALIGNED, "gate_up");
  auto options = sized<conclave_source_options>();
  options.order = 3;
  const NamedWeights named(weights);
  expect_error(conclave_source_from_tensors(named.named.data(), named.named.size(), &options, &out),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "order");
  expect_error(conclave_source_from_tensors(nullptr, 2, nullptr, &out), CONCLAVE_ERROR_NULL_POINTER,
               "tensors");

  // A source that is right by itself, and lacks what the spec asks for.
  const auto source = make<conclave_source>(&conclave_source_from_tensors, named.named.data(),
                                            named.named.size(), nullptr);
  MoeSpec with_bias = weights.spec;
  with_bias.has_bias = true;
  const auto spec = spec_handle(with_bias);
  const auto context = make_context();
  conclave_layer* layer = nullptr;
  expect_error(
      conclave_layer_create(context.get(), spec.get(), source.get(), nullptr, nullptr, &layer),
      CONCLAVE_ERROR_TENSOR_MISSING, "bias");
}

// Pushes every tensor of a model's one file under its name, and its config as text.
void feed_model(conclave_feed* feed, const std::string& path, std::vector<Tensor>& kept,
                conclave_feed_memory memory) {
  const SafetensorsFile file = SafetensorsFile::open(path + "/model.safetensors");
  int32_t used_in_all = 0;
  for (const TensorInfo& info : file.tensors()) {
    Tensor tensor(info.dtype, Shape(info.shape));
    file.read(info, 0, {tensor.as<std::byte>(), tensor.size_bytes()});
    const conclave_tensor view = tensor_of(tensor.const_view());
    int32_t used = -1;
    ASSERT_EQ(conclave_feed_put(feed, info.name.c_str(), &view, memory, &used), CONCLAVE_OK)
        << conclave_last_error_message();
    used_in_all += used;
    kept.push_back(std::move(tensor));
  }
  EXPECT_GT(used_in_all, 0);
}

std::string file_text(const std::string& path) {
  std::string text;
  FILE* const file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return text;
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) text += static_cast<char>(c);
  std::fclose(file);
  return text;
}

class Feeds : public ::testing::TestWithParam<const char*> {};

TEST_P(Feeds, PushedTensors_HaveTheBitsOfTheFile) {
  const std::string path = GetParam();
  const auto feed =
      make<conclave_feed>(&conclave_feed_from_config, file_text(path + "/config.json").c_str());
  std::vector<Tensor> kept;
  int64_t layer_number = -1;
  ASSERT_EQ(conclave_feed_layer_at(feed.get(), 0, &layer_number), CONCLAVE_OK);
  int32_t complete = -1;
  ASSERT_EQ(conclave_feed_is_complete(feed.get(), layer_number, &complete), CONCLAVE_OK);
  EXPECT_EQ(complete, 0);
  EXPECT_NE(testing::text_by(&conclave_feed_missing, feed.get(), size_t{3}), "");
  conclave_source* too_early = nullptr;
  expect_error(conclave_feed_source(feed.get(), layer_number, &too_early),
               CONCLAVE_ERROR_TENSOR_MISSING, "");
  feed_model(feed.get(), path, kept, CONCLAVE_FEED_MEMORY_KEEP);
  EXPECT_EQ(testing::text_by(&conclave_feed_missing, feed.get(), size_t{3}), "");

  const Checkpoint checkpoint = Checkpoint::open(path);
  const MoeSpec& spec = checkpoint.layers()[0].spec;
  const Tensor hidden = random_tensor(DType::kBF16, kTokens, spec.hidden_size, 7);
  auto source = make<conclave_source>(&conclave_feed_source, feed.get(), layer_number);
  const auto own_spec = make<conclave_spec>(&conclave_feed_spec, feed.get(), layer_number);
  const auto layer = create(own_spec.get(), source.get());
  EXPECT_TRUE(same_bits(run_c(layer.get(), hidden),
                        run_cpp(spec, *checkpoint.layer_source(layer_number), hidden)));

  expect_error(conclave_feed_release(feed.get(), layer_number), CONCLAVE_ERROR_STATE, "source");
  source.reset();
  // The layer is packed: it holds no source, not even of a reload that failed.
  const auto other = testing::open_model();
  EXPECT_NE(conclave_layer_reload_from_checkpoint(layer.get(), other.get(), 0,
                                                  CONCLAVE_RELOAD_MODE_STAGED),
            CONCLAVE_OK);
  EXPECT_EQ(conclave_feed_release(feed.get(), layer_number), CONCLAVE_OK);
}

INSTANTIATE_TEST_SUITE_P(Models, Feeds,
                         ::testing::Values("testdata/models/mixtral",
                                           "testdata/quantised/mixtral-gptq-int4-order",
                                           "testdata/quantised/mixtral-compressed-nvfp4",
                                           "testdata/quantised/mixtral-bnb-nf4-nested"),
                         [](const auto& model) {
                           std::string name = model.param;
                           std::replace_if(
                               name.begin(), name.end(),
                               [](char c) { return c == '/' || c == '-'; }, '_');
                           return name;
                         });

TEST(Feed, OfASpec_TakesTheNamesOfItsFamily) {
  const MoeSpec spec = make_spec(2, 1, kHidden, kIntermediate, DType::kF32);
  const auto own = spec_handle(spec);
  const int64_t layers[] = {3, 5};
  const auto feed = make<conclave_feed>(&conclave_feed_from_spec, own.get(), "qwen3_moe", layers,
                                        size_t{2}, nullptr);
  size_t count = 0;
  ASSERT_EQ(conclave_feed_num_layers(feed.get(), &count), CONCLAVE_OK);
  EXPECT_EQ(count, 2U);
  int64_t layer = 0;
  ASSERT_EQ(conclave_feed_layer_at(feed.get(), 1, &layer), CONCLAVE_OK);
  EXPECT_EQ(layer, 5);
  expect_error(conclave_feed_layer_at(feed.get(), 2, &layer), CONCLAVE_ERROR_LAYER_NOT_FOUND, "2");
  const Tensor gate = random_tensor(DType::kF32, 2, kHidden, 1);
  const conclave_tensor view = tensor_of(gate.const_view());
  int32_t used = -1;
  ASSERT_EQ(conclave_feed_put(feed.get(), "model.layers.3.mlp.gate.weight", &view, 0, &used),
            CONCLAVE_OK)
      << conclave_last_error_message();
  EXPECT_EQ(used, 1);
  expect_error(conclave_feed_put(feed.get(), "model.layers.3.mlp.gate.weight", &view, 0, &used),
               CONCLAVE_ERROR_TENSOR_DUPLICATE, "model.layers.3.mlp.gate.weight");
  ASSERT_EQ(conclave_feed_put(feed.get(), "model.embed_tokens.weight", &view, 0, nullptr),
            CONCLAVE_OK);
  expect_error(conclave_feed_put(feed.get(), "model.layers.5.mlp.gate.weight", &view, 2, &used),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "memory");
  const int64_t shape[] = {1, 32};
  expect_error(conclave_feed_put_gguf(feed.get(), "blk.0.ffn_gate_inp.weight", 0, shape, 2,
                                      gate.as<void>(), 128, 0, &used),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "");
  expect_error(
      conclave_feed_put_gguf(feed.get(), "blk.0.x", 0, shape, 9, gate.as<void>(), 128, 0, &used),
      CONCLAVE_ERROR_SHAPE, "rank");
  conclave_feed* out = nullptr;
  expect_error(conclave_feed_from_spec(own.get(), "no_such_model", layers, 2, nullptr, &out),
               CONCLAVE_ERROR_UNKNOWN_ARCHITECTURE, "no_such_model");
  expect_error(conclave_feed_from_config("{", &out), CONCLAVE_ERROR_JSON_SYNTAX, "");
  expect_error(conclave_feed_from_gguf("GGUX....", 8, &out), CONCLAVE_ERROR_GGUF_MAGIC, "");
}

}  // namespace
}  // namespace conclave
