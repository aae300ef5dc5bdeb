// Adapters that PEFT saved, against PEFT's own results, and files that are wrong.
#include "conclave/lora_checkpoint.h"

#include "checkpoint/lora/name_pattern.h"
#include "support/layer_fixture.h"

#include "conclave/checkpoint.h"
#include "conclave/error.h"
#include "conclave/layer.h"
#include "conclave/lora.h"
#include "conclave/reference.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;

Tensor zero_ids(int64_t tokens) { return Tensor(DType::kI32, {tokens}); }

class PeftAdapters : public ::testing::TestWithParam<const char*> {};

// PEFT computed its outputs in float64 on the recorded inputs and routing.
TEST_P(PeftAdapters, Results_AreThoseOfPeft) {
  const std::string name = GetParam();
  const Checkpoint model = Checkpoint::open("testdata/" + name);
  const LoraCheckpoint adapters = LoraCheckpoint::open("testdata/adapters/" + name);
  const auto inputs = SafetensorsFile::open("testdata/" + name + "/reference.safetensors");
  const auto outputs =
      SafetensorsFile::open("testdata/adapters/" + name + "/reference.safetensors");
  const Context context({.num_threads = 2});
  ASSERT_EQ(adapters.layers().size(), model.layers().size());
  for (const int64_t index : adapters.layers()) {
    const std::string prefix = "layers." + std::to_string(index) + ".";
    const Tensor hidden = inputs.load(prefix + "hidden_states");
    const Tensor ids = inputs.load(prefix + "topk_ids");
    const Tensor weights = inputs.load(prefix + "topk_weights");
    const Tensor expected = outputs.load(prefix + "output");
    const auto count = static_cast<size_t>(expected.shape().num_elements());
    const std::span<const double> wanted(expected.as<double>(), count);
    const MoeSpec& spec = model.layer(index).spec;
    const auto source = model.layer_source(index);
    const std::vector<LoraAdapter> adapter = {adapters.layer(index, model)};
    const Tensor places = zero_ids(hidden.shape()[0]);
    const ReferenceResult reference = reference_forward(context, spec, *source,
                                                        {.hidden = hidden.view(),
                                                         .topk_ids = ids.view(),
                                                         .topk_weights = weights.view(),
                                                         .adapters = adapter,
                                                         .adapter_ids = places.view()});
    Tensor exact(DType::kF32, expected.shape());
    for (size_t i = 0; i < count; ++i) {
      EXPECT_NEAR(reference.output[i], wanted[i], 1e-12 + 1e-9 * std::abs(wanted[i]));
    }
    MoeLayer layer = MoeLayer::create(
        context, spec, *source, {.max_adapter_rank = static_cast<int32_t>(adapters.max_rank())});
    const int32_t id = layer.add_adapter(adapter[0]);
    Tensor out(DType::kF32, expected.shape());
    layer.forward({.hidden = hidden.view(),
                   .topk_ids = ids.view(),
                   .topk_weights = weights.view(),
                   .adapter = id,
                   .out = out.view()});
    EXPECT_LE(worst(token_errors(out.view(), wanted)),
              accuracy_bar(spec.weight_dtype, DType::kF32));
    layer.forward({.hidden = hidden.view(),
                   .topk_ids = ids.view(),
                   .topk_weights = weights.view(),
                   .out = out.view()});
    EXPECT_GT(worst(token_errors(out.view(), wanted)), 0.1);
  }
}

INSTANTIATE_TEST_SUITE_P(All, PeftAdapters, ::testing::Values("mixtral-tiny", "qwen2-moe-tiny"));

// A directory with an adapter of a model with E = 3, H = 8, I = 6.
class SavedAdapter {
 public:
  using Shape2 = std::pair<int64_t, int64_t>;

  explicit SavedAdapter(const std::string& name)
      : folder_(fs::temp_directory_path() / ("conclave_lora_" + name)) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  SavedAdapter(const SavedAdapter&) = delete;
  SavedAdapter& operator=(const SavedAdapter&) = delete;
  ~SavedAdapter() { fs::remove_all(folder_); }

  // Values count up from `first`, so that each has its place.
  void put(const std::string& module, Shape2 a, Shape2 b, float first = 0) {
    tensors_["base_model.model." + module + ".lora_A.weight"] = {a, first};
    tensors_["base_model.model." + module + ".lora_B.weight"] = {b, first + 1000};
  }
  void put_tensor(const std::string& name, Shape2 shape) { tensors_[name] = {shape, 0}; }
  void erase(const std::string& name) { tensors_.erase(name); }
  fs::path save(const std::string& config) const {
    std::ofstream(folder_ / "adapter_config.json") << config;
    SafetensorsWriter writer(folder_ / "adapter_model.safetensors");
    for (const auto& [name, tensor] : tensors_) {
      writer.declare(name, DType::kF32, {tensor.first.first, tensor.first.second});
    }
    for (const auto& [name, tensor] : tensors_) {
      std::vector<float> values(static_cast<size_t>(tensor.first.first * tensor.first.second));
      for (size_t i = 0; i < values.size(); ++i) values[i] = tensor.second + static_cast<float>(i);
      writer.write(std::as_bytes(std::span(values)));
    }
    writer.finish();
    return folder_;
  }

 private:
  fs::path folder_;
  std::map<std::string, std::pair<Shape2, float>> tensors_;
};

constexpr const char* kConfig =
    R"({"peft_type": "LORA", "peft_version": "0.21.2", "r": 2, "lora_alpha": 3})";

MoeSpec small_spec() {
  MoeSpec spec;
  spec.num_experts = 3;
  spec.top_k = 2;
  spec.hidden_size = 8;
  spec.intermediate_size = 6;
  return spec;
}

float at(const ConstTensorView& view, int64_t row, int64_t col) {
  return static_cast<const float*>(view.data)[row * view.shape[1] + col];
}

const LoraFactors& find(const LoraAdapter& adapter, WeightMatrix matrix, int64_t expert) {
  for (const LoraFactors& factors : adapter.factors) {
    if (factors.matrix == matrix && factors.expert == expert) return factors;
  }
  throw Error(ErrorCode::kInternal, "no such factors");
}

// The projections of single experts, by either family's names.
TEST(LoraCheckpoint, ProjectionsOfExperts_AreRead) {
  for (const auto& [block, names] :
       {std::pair{"block_sparse_moe", std::array{"w1", "w3", "w2"}},
        std::pair{"mlp", std::array{"gate_proj", "up_proj", "down_proj"}}}) {
    SavedAdapter saved("experts");
    const std::string expert = "model.layers.4." + std::string(block) + ".experts.2.";
    saved.put(expert + names[0], {2, 8}, {6, 2}, 10);
    saved.put(expert + names[1], {2, 8}, {6, 2}, 20);
    saved.put(expert + names[2], {2, 6}, {8, 2}, 30);
    saved.put("model.layers.4.self_attn.q_proj", {2, 8}, {8, 2});
    const LoraCheckpoint adapters = LoraCheckpoint::open(saved.save(kConfig));
    EXPECT_EQ(adapters.layers().size(), 1U);
    EXPECT_EQ(adapters.max_rank(), 2);
    ASSERT_EQ(adapters.others().size(), 1U);
    EXPECT_EQ(adapters.others()[0], "model.layers.4.self_attn.q_proj");
    const LoraAdapter adapter = adapters.layer(4, small_spec());
    ASSERT_EQ(adapter.factors.size(), 3U);
    EXPECT_EQ(at(find(adapter, WeightMatrix::kGate, 2).a, 0, 0), 10);
    EXPECT_EQ(at(find(adapter, WeightMatrix::kUp, 2).b, 0, 1), 1021);
    EXPECT_EQ(at(find(adapter, WeightMatrix::kDown, 2).a, 1, 0), 36);
    EXPECT_EQ(adapter.factors[0].scale, 1.5);
    check_adapter(adapter, small_spec());
  }
}

// lora_A counts expert * r + rank, lora_B rank * E + expert.
TEST(LoraCheckpoint, StackedParameters_AreTakenApart) {
  SavedAdapter saved("stacked");
  saved.put("model.layers.0.mlp.experts.base_layer", {6, 8}, {12, 6}, 100);
  saved.put("model.layers.0.mlp.experts", {6, 6}, {8, 6}, 5000);
  const LoraCheckpoint adapters = LoraCheckpoint::open(saved.save(kConfig));
  const LoraAdapter joined = adapters.layer(0, small_spec());
  ASSERT_EQ(joined.factors.size(), 9U);
  EXPECT_EQ(at(find(joined, WeightMatrix::kGate, 1).a, 1, 3), 100 + 3 * 8 + 3);
  EXPECT_EQ(at(find(joined, WeightMatrix::kGate, 1).b, 2, 1), 1100 + 2 * 6 + 1 * 3 + 1);
  EXPECT_EQ(at(find(joined, WeightMatrix::kUp, 1).b, 2, 1), 1100 + (6 + 2) * 6 + 1 * 3 + 1);
  EXPECT_EQ(at(find(joined, WeightMatrix::kDown, 2).b, 7, 0), 6000 + 7 * 6 + 2);
  const LoraAdapter in_turn = adapters.layer(0, small_spec(), GateUpOrder::kInterleaved);
  EXPECT_EQ(at(find(in_turn, WeightMatrix::kUp, 1).b, 2, 1), 1100 + 5 * 6 + 1 * 3 + 1);
  check_adapter(joined, small_spec());
}

// Before 0.19 PEFT took rows for columns: lora_A^T lora_B^T is the change of the same parameter.
TEST(LoraCheckpoint, StacksOfOlderVersions_AreTurned) {
  SavedAdapter saved("older");
  saved.put("model.layers.0.mlp.experts", {6, 12}, {8, 6}, 100);
  const LoraAdapter adapter =
      LoraCheckpoint::open(saved.save(R"({"peft_type": "LORA", "peft_version": "0.18.1", "r": 2,
                                          "lora_alpha": 2})"))
          .layer(0, small_spec());
  ASSERT_EQ(adapter.factors.size(), 6U);
  // W[i, o] changes by the sum over r of B[o, r E + e] A[e r + r, i].
  EXPECT_EQ(at(find(adapter, WeightMatrix::kUp, 2).b, 1, 0), 100 + 4 * 12 + 6 + 1);
  EXPECT_EQ(at(find(adapter, WeightMatrix::kUp, 2).a, 1, 5), 1100 + 5 * 6 + 1 * 3 + 2);
  check_adapter(adapter, small_spec());
}

// Stacks of Llama 4 are [E, in, out], which its class does not say: PEFT takes rows for columns
// there in every version from 0.19 on.
TEST(LoraCheckpoint, StacksWithColumnsFirst_AreTurnedWhereShapesSaySo) {
  const Checkpoint model = Checkpoint::open("testdata/models/llama4_text");
  const MoeSpec& spec = model.layer(1).spec;
  ASSERT_EQ(spec.num_experts, 10);
  ASSERT_EQ(spec.hidden_size, 40);
  ASSERT_EQ(spec.intermediate_size, 36);
  const std::string module = "model.layers.1.feed_forward.experts";
  SavedAdapter turned("columns_first");
  turned.put(module + ".base_layer", {20, 72}, {40, 20}, 100);
  turned.put(module, {20, 40}, {36, 20}, 5000);
  const LoraAdapter adapter = LoraCheckpoint::open(turned.save(kConfig)).layer(1, model);
  ASSERT_EQ(adapter.factors.size(), 30U);
  // W[i, o] changes by the sum over r of B[i, r E + e] A[e r + r, o].
  EXPECT_EQ(at(find(adapter, WeightMatrix::kUp, 3).b, 1, 0), 100 + 6 * 72 + 36 + 1);
  EXPECT_EQ(at(find(adapter, WeightMatrix::kGate, 3).a, 1, 5), 1100 + 5 * 20 + 10 + 3);
  EXPECT_EQ(at(find(adapter, WeightMatrix::kDown, 9).b, 7, 1), 5000 + 19 * 40 + 7);
  EXPECT_EQ(at(find(adapter, WeightMatrix::kDown, 9).a, 0, 4), 6000 + 4 * 20 + 9);
  check_adapter(adapter, spec);
  // A class that says it, or an older version: as they are.
  SavedAdapter straight("columns_first_straight");
  straight.put(module, {20, 36}, {40, 20}, 5000);
  const LoraAdapter plain = LoraCheckpoint::open(straight.save(kConfig)).layer(1, model);
  EXPECT_EQ(at(find(plain, WeightMatrix::kDown, 9).a, 1, 4), 5000 + 19 * 36 + 4);
  check_adapter(plain, spec);
}

// A model of this family of one layer, whose shapes fit both ways: gate_up_proj [E, in, out] with 2
// I = H, or down_proj with I = H.
class AmbiguousModel {
 public:
  AmbiguousModel(const std::string& type, int64_t hidden, int64_t inner)
      : folder_(fs::temp_directory_path() /
                ("conclave_ambiguous_" + std::to_string(getpid()) + "_" + type +
                 std::to_string(hidden) + "_" + std::to_string(inner))) {
    fs::create_directories(folder_);
    const std::string sizes = R"("hidden_size": )" + std::to_string(hidden) +
                              R"(, "intermediate_size": )" + std::to_string(inner) +
                              R"(, "moe_intermediate_size": )" + std::to_string(inner);
    std::ofstream(folder_ / "config.json")
        << R"({"model_type": ")" + type + R"(", "num_hidden_layers": 1, "num_local_experts": 3,
               "num_experts": 3, "num_experts_per_tok": 1, "hidden_act": "silu", )" +
               sizes + "}";
    const std::string block =
        "model.layers.0." + std::string(type == "llama4_text" ? "feed_forward." : "mlp.");
    const bool has_shared = type == "llama4_text";
    std::vector<std::pair<std::string, std::vector<int64_t>>> tensors = {
        {block + "experts.gate_up_proj", {3, hidden, 2 * inner}},
        {block + "experts.down_proj", {3, inner, hidden}},
        {block + (has_shared ? "router.weight" : "gate.weight"), {3, hidden}}};
    if (has_shared) {
      tensors.push_back({block + "shared_expert.gate_proj.weight", {inner, hidden}});
      tensors.push_back({block + "shared_expert.up_proj.weight", {inner, hidden}});
      tensors.push_back({block + "shared_expert.down_proj.weight", {hidden, inner}});
    }
    SafetensorsWriter writer(folder_ / "model.safetensors");
    for (const auto& [name, shape] : tensors) writer.declare(name, DType::kF32, shape);
    for (const auto& [name, shape] : tensors) {
      const std::vector<float> zeros(
          static_cast<size_t>(Shape(std::span<const int64_t>(shape)).num_elements()));
      writer.write(std::as_bytes(std::span(zeros)));
    }
    writer.finish();
  }
  AmbiguousModel(const AmbiguousModel&) = delete;
  AmbiguousModel& operator=(const AmbiguousModel&) = delete;
  ~AmbiguousModel() { fs::remove_all(folder_); }

  Checkpoint open() const { return Checkpoint::open(folder_); }

 private:
  fs::path folder_;
};

constexpr const char* kOlderConfig =
    R"({"peft_type": "LORA", "peft_version": "0.18.1", "r": 2, "lora_alpha": 2})";

// From 0.19 on PEFT turns stacks of Llama 4, before it did not.
TEST(LoraCheckpoint, StacksThatFitBothWays_AreTurnedByTheVersion) {
  const std::string module = "model.layers.0.feed_forward.experts";
  {
    const AmbiguousModel saved_model("llama4_text", 8, 4);
    const Checkpoint model = saved_model.open();
    SavedAdapter gate_up("both_ways_up");
    gate_up.put(module, {6, 8}, {8, 6}, 100);
    // W[i, o] changes by the sum over r of B[o, r E + e] A[e r + r, i].
    const LoraAdapter straight = LoraCheckpoint::open(gate_up.save(kOlderConfig)).layer(0, model);
    EXPECT_EQ(at(find(straight, WeightMatrix::kUp, 2).a, 1, 5), 100 + 5 * 8 + 5);
    EXPECT_EQ(at(find(straight, WeightMatrix::kUp, 2).b, 1, 0), 1100 + (4 + 1) * 6 + 2);
    check_adapter(straight, model.layer(0).spec);
    // By that of B[i, r E + e] A[e r + r, o].
    const LoraAdapter turned = LoraCheckpoint::open(gate_up.save(kConfig)).layer(0, model);
    EXPECT_EQ(at(find(turned, WeightMatrix::kUp, 2).a, 1, 5), 1100 + 5 * 6 + 3 + 2);
    EXPECT_EQ(at(find(turned, WeightMatrix::kUp, 2).b, 1, 0), 100 + 4 * 8 + 4 + 1);
    check_adapter(turned, model.layer(0).spec);
  }
  const AmbiguousModel saved_model("llama4_text", 8, 8);
  const Checkpoint model = saved_model.open();
  SavedAdapter down("both_ways_down");
  down.put(module, {6, 8}, {8, 6}, 100);
  const LoraAdapter straight = LoraCheckpoint::open(down.save(kOlderConfig)).layer(0, model);
  EXPECT_EQ(at(find(straight, WeightMatrix::kDown, 2).a, 1, 5), 100 + 5 * 8 + 5);
  EXPECT_EQ(at(find(straight, WeightMatrix::kDown, 2).b, 3, 0), 1100 + 3 * 6 + 2);
  const LoraAdapter turned = LoraCheckpoint::open(down.save(kConfig)).layer(0, model);
  EXPECT_EQ(at(find(turned, WeightMatrix::kDown, 2).a, 1, 5), 1100 + 5 * 6 + 3 + 2);
  EXPECT_EQ(at(find(turned, WeightMatrix::kDown, 2).b, 3, 0), 100 + 4 * 8 + 3);
}

// Files of this family have stacks either way, and its class has had both.
TEST(LoraCheckpoint, StacksOfAFamilyWithBothOrders_AreRefusedWhereShapesDoNotTell) {
  const AmbiguousModel saved_model("qwen3_moe", 8, 8);
  const Checkpoint model = saved_model.open();
  SavedAdapter down("both_orders");
  down.put("model.layers.0.mlp.experts", {6, 8}, {8, 6}, 100);
  const LoraCheckpoint adapters = LoraCheckpoint::open(down.save(kConfig));
  EXPECT_EQ(code_of([&] { adapters.layer(0, model); }), ErrorCode::kUnsupported);
}

struct Wrong {
  const char* name;
  const char* config;
  std::function<void(SavedAdapter&)> spoil;
  ErrorCode code;
  std::string text;
};

const std::vector<Wrong> kWrong = {
    {"type", R"({"peft_type": "IA3", "r": 2, "lora_alpha": 3})", nullptr, ErrorCode::kUnsupported,
     "IA3"},
    {"rank_0", R"({"peft_type": "LORA", "r": 0, "lora_alpha": 3})", nullptr,
     ErrorCode::kConfigValue, "r"},
    {"no_rank", R"({"peft_type": "LORA", "lora_alpha": 3})", nullptr, ErrorCode::kConfigMissingKey,
     "r"},
    {"dora", R"({"peft_type": "LORA", "r": 2, "lora_alpha": 3, "use_dora": true})", nullptr,
     ErrorCode::kUnsupported, "use_dora"},
    {"pissa", R"({"peft_type": "LORA", "r": 2, "lora_alpha": 3, "init_lora_weights": "pissa"})",
     nullptr, ErrorCode::kUnsupported, "init_lora_weights"},
    {"pattern", R"({"peft_type": "LORA", "r": 2, "lora_alpha": 3, "rank_pattern": {"(": 2}})",
     nullptr, ErrorCode::kConfigValue, "rank_pattern"},
    {"other_rank", R"({"peft_type": "LORA", "r": 4, "lora_alpha": 3})", nullptr,
     ErrorCode::kConfigValue, "adapter_config.json"},
    {"json", R"({"peft_type": )", nullptr, ErrorCode::kJsonSyntax, "adapter_config.json"},
    {"router", kConfig,
     [](SavedAdapter& s) {
       s.put("model.layers.0.mlp.gate", {2, 8}, {3, 2});
     },
     ErrorCode::kUnsupported, "mlp.gate"},
    {"whole", kConfig,
     [](SavedAdapter& s) {
       s.put_tensor("base_model.model.model.layers.0.mlp.gate.weight", {3, 8});
     },
     ErrorCode::kUnsupported, "mlp.gate.weight"},
    {"projection", kConfig,
     [](SavedAdapter& s) {
       s.put("model.layers.0.mlp.experts.0.w9", {2, 8}, {6, 2});
     },
     ErrorCode::kUnsupported, "w9"},
    {"half", kConfig,
     [](SavedAdapter& s) {
       s.erase("base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_B.weight");
     },
     ErrorCode::kTensorMissing, "up_proj"},
    {"ranks", kConfig,
     [](SavedAdapter& s) {
       s.put("model.layers.0.mlp.experts.1.up_proj", {2, 8}, {6, 3});
     },
     ErrorCode::kTensorShape, "[6, 2]"},
    {"model", kConfig,
     [](SavedAdapter& s) {
       s.put("model.layers.0.mlp.experts.1.up_proj", {2, 9}, {6, 2});
     },
     ErrorCode::kTensorShape, "[2, 8]"},
    {"expert", kConfig,
     [](SavedAdapter& s) {
       s.put("model.layers.0.mlp.experts.3.up_proj", {2, 8}, {6, 2});
     },
     ErrorCode::kTensorUnexpected, "3 experts"},
    {"shared", kConfig,
     [](SavedAdapter& s) {
       s.put("model.layers.0.mlp.shared_expert.up_proj", {2, 8}, {6, 2});
     },
     ErrorCode::kTensorUnexpected, "shared"},
    {"stack", kConfig,
     [](SavedAdapter& s) {
       s.put("model.layers.0.mlp.experts", {4, 8}, {12, 4});
     },
     ErrorCode::kTensorShape, "multiple of 3"},
    {"twice", kConfig,
     [](SavedAdapter& s) {
       s.put_tensor("model.layers.0.mlp.experts.1.up_proj.lora_A.weight", {2, 8});
     },
     ErrorCode::kTensorDuplicate, "model.layers.0.mlp.experts.1.up_proj.lora_A.weight"},
    {"ahead", R"({"peft_type": "LORA", "r": 2, "lora_alpha": 3, "rank_pattern": {"(?=a)b": 2}})",
     nullptr, ErrorCode::kConfigValue, "rank_pattern"},
    {"stack_model", kConfig,
     [](SavedAdapter& s) {
       s.put("model.layers.0.mlp.experts", {6, 10}, {12, 6});
     },
     ErrorCode::kTensorShape, "[6, 10]"},
};

TEST(LoraCheckpoint, WrongFiles_AreNamed) {
  for (const Wrong& wrong : kWrong) {
    SCOPED_TRACE(wrong.name);
    SavedAdapter saved(std::string("wrong_") + wrong.name);
    saved.put("model.layers.0.mlp.experts.1.up_proj", {2, 8}, {6, 2});
    if (wrong.spoil) wrong.spoil(saved);
    try {
      LoraCheckpoint::open(saved.save(wrong.config)).layer(0, small_spec());
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), wrong.code) << error.what();
      EXPECT_NE(std::string(error.what()).find(wrong.text), std::string::npos) << error.what();
    }
  }
}

// Without a gate up_proj and down_proj have the same shapes where I = H.
TEST(LoraCheckpoint, SquareStacks_AreRefused) {
  MoeSpec spec = small_spec();
  spec.intermediate_size = 8;
  spec.activation.name = "relu2_no_mul";
  SavedAdapter saved("square");
  saved.put("model.layers.0.mlp.experts", {6, 8}, {8, 6});
  const LoraCheckpoint adapters = LoraCheckpoint::open(saved.save(kConfig));
  try {
    adapters.layer(0, spec);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
  }
  spec.intermediate_size = 6;
  SavedAdapter other("oblong");
  other.put("model.layers.0.mlp.experts", {6, 6}, {8, 6});
  EXPECT_EQ(LoraCheckpoint::open(other.save(kConfig)).layer(0, spec).factors[0].matrix,
            WeightMatrix::kDown);
}

TEST(NamePatterns, PlainNamesAndExpressions_MatchAsInPeft) {
  const std::string name = "model.layers.0.mlp.experts.1.up_proj";
  for (const char* pattern : {"up_proj", "experts.1.up_proj", "mlp.experts.1.up_proj$",
                              "^model.layers.0.mlp.experts.1.up_proj", R"(experts\.1\.up_proj)",
                              "experts.*", "(up|down)_proj", R"(layers\.\d{1,2}\.mlp.*)",
                              "model?.layers.*", "m[a-p]del.+proj", "^.*up_proj"}) {
    EXPECT_TRUE(NamePattern(pattern).matches(name)) << pattern;
  }
  for (const char* pattern :
       {"p_proj", "up_pro", "experts.2.up_proj", "^experts.1.up_proj", "up.proj.",
        R"(experts\.1\.up\.proj)", "", "(gate|down)_proj", "xmodel.*"}) {
    EXPECT_FALSE(NamePattern(pattern).matches(name)) << pattern;
  }
  EXPECT_TRUE(NamePattern("up.proj").matches(name)) << "a dot is any letter";
}

// Trying one way after another would take longer than the universe is old.
TEST(NamePatterns, HostileExpressions_TakeBoundedTime) {
  const std::string name = std::string(300, 'a') + "." + std::string(3000, 'b');
  for (const char* pattern : {"(a*)*c", "(a|aa)+.c", "([ab.]+)*X", "(.*a){3}(.*b){5}c"}) {
    EXPECT_FALSE(NamePattern(pattern).matches(name)) << pattern;
  }
  for (const std::string& pattern :
       {std::string("((a{9}){9})x*"), std::string("(a?){99999999999999999999}"),
        std::string("(?=.*a).*"), std::string("(?!b)(.*)"), std::string(R"((a*)\1)"),
        std::string("a{2,"), std::string("(")}) {
    EXPECT_THROW(NamePattern{pattern}, std::regex_error) << pattern;
  }
  EXPECT_EQ(NamePattern("model.layers.0").regex_letters(), 0U);
  EXPECT_EQ(NamePattern("a+").regex_letters(), 2U);
}

// What a file claims is no number of bytes to book.
TEST(LoraCheckpoint, RanksBeyondAnyLayers_AreNotReported) {
  SavedAdapter saved("ranks");
  saved.put("model.layers.0.mlp.experts.1.up_proj", {int64_t{1} << 33, 0}, {0, 2});
  const LoraCheckpoint adapters = LoraCheckpoint::open(saved.save(kConfig));
  EXPECT_EQ(adapters.max_rank(), kMostAdapterRank);
  try {
    adapters.layer(0, small_spec());
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTensorShape) << error.what();
  }
}

TEST(LoraCheckpoint, LayersThatTheModelLacks_AreNamed) {
  SavedAdapter saved("layers");
  saved.put("model.layers.7.mlp.experts.1.up_proj", {2, 72}, {40, 2});
  const LoraCheckpoint adapters = LoraCheckpoint::open(saved.save(kConfig));
  const Checkpoint model = Checkpoint::open("testdata/mixtral-tiny");
  const auto code = [&](const auto& action) {
    try {
      action();
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode{0};
  };
  EXPECT_EQ(code([&] { adapters.layer(0, model); }), ErrorCode::kLayerNotFound);
  EXPECT_EQ(code([&] { adapters.layer(0, small_spec()); }), ErrorCode::kLayerNotFound);
  EXPECT_EQ(code([&] { LoraCheckpoint::open("testdata/mixtral-tiny"); }), ErrorCode::kFileNotFound);
}

}  // namespace
}  // namespace conclave::testing
