// Adapters through the C interface: those of PEFT's directories and those in memory have the bits
// of C++, and what is wrong with one is told.
#include "capi/handles.h"
#include "support/layer_fixture.h"

#include "conclave/checkpoint.h"
#include "conclave/lora.h"
#include "conclave/lora_checkpoint.h"
#include "conclave/safetensors.h"

#include <nlohmann/json.hpp>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using testing::expect_error;
using testing::Handle;
using testing::make;
using testing::random_tensor;
using testing::same_bits;
using testing::sized;
using testing::tensor_of;

constexpr const char* kMixtral = "testdata/mixtral-tiny";
constexpr const char* kAdapters = "testdata/adapters/mixtral-tiny";
constexpr int64_t kTokens = 6;

// A layer of the bundled Mixtral in both interfaces, with room for adapters.
class Adapters : public ::testing::Test {
 protected:
  Adapters()
      : cpp_checkpoint_(Checkpoint::open(kMixtral)),
        spec_(cpp_checkpoint_.layer(0).spec),
        cpp_source_(cpp_checkpoint_.layer_source(0)),
        cpp_layer_(MoeLayer::create(cpp_context_, spec_, *cpp_source_, {.max_adapter_rank = 16})),
        checkpoint_(testing::open_model(kMixtral)),
        layer_(make_layer(16)),
        hidden_(random_tensor(DType::kF32, kTokens, spec_.hidden_size, 3)) {}

  Handle<conclave_layer> make_layer(int64_t max_adapter_rank) {
    auto options = sized<conclave_layer_options>();
    options.max_adapter_rank = max_adapter_rank;
    return make<conclave_layer>(&conclave_layer_create_from_checkpoint, context_.get(),
                                checkpoint_.get(), int64_t{0}, &options, nullptr);
  }

  conclave_status forward(const conclave_layer* layer, Tensor& out, const int32_t* adapter,
                          const conclave_tensor* ids = nullptr,
                          conclave_workspace* workspace = nullptr) {
    const conclave_tensor in = tensor_of(hidden_.const_view());
    const conclave_tensor written = tensor_of(out.const_view());
    auto args = sized<conclave_forward_args>();
    args.hidden = &in;
    args.out = &written;
    args.adapter = adapter;
    args.adapter_ids = ids;
    args.workspace = workspace;
    return conclave_layer_forward(layer, &args);
  }
  Tensor rows() const { return Tensor(DType::kF32, hidden_.shape()); }

  Context cpp_context_{ContextOptions{.num_threads = 2}};
  Checkpoint cpp_checkpoint_;
  MoeSpec spec_;
  std::unique_ptr<WeightSource> cpp_source_;
  MoeLayer cpp_layer_;
  Handle<conclave_context> context_ = testing::make_context();
  Handle<conclave_checkpoint> checkpoint_;
  Handle<conclave_layer> layer_;
  Tensor hidden_;
};

Handle<conclave_lora_checkpoint> open_adapters() {
  return make<conclave_lora_checkpoint>(&conclave_lora_checkpoint_open, kAdapters);
}

TEST_F(Adapters, OfADirectory_HaveTheBitsOfCpp_ByTokenToo) {
  auto adapters = open_adapters();
  auto info = sized<conclave_lora_checkpoint_info>();
  ASSERT_EQ(conclave_lora_checkpoint_get_info(adapters.get(), &info), CONCLAVE_OK);
  ASSERT_GT(info.num_layers, 0U);
  EXPECT_EQ(info.layers[0], 0);
  EXPECT_LE(info.max_rank, 16);
  int32_t id = 7;
  ASSERT_EQ(conclave_layer_add_adapter_from_checkpoint(layer_.get(), adapters.get(), 0,
                                                       checkpoint_.get(), 0, &id),
            CONCLAVE_OK)
      << conclave_last_error_message();
  EXPECT_EQ(id, 0);
  int32_t second = 7;
  ASSERT_EQ(
      conclave_layer_add_adapter_from_checkpoint(layer_.get(), adapters.get(), 0, nullptr,
                                                 CONCLAVE_GATE_UP_ORDER_CONCATENATED, &second),
      CONCLAVE_OK);
  EXPECT_EQ(second, 1);
  adapters.reset();  // factors are copied

  const LoraCheckpoint cpp_adapters = LoraCheckpoint::open(kAdapters);
  ASSERT_EQ(cpp_layer_.add_adapter(cpp_adapters.layer(0, cpp_checkpoint_)), 0);
  Tensor expected = rows();
  cpp_layer_.forward({.hidden = hidden_.const_view(), .adapter = 0, .out = expected.view()});
  Tensor plain = rows();
  cpp_layer_.forward({.hidden = hidden_.const_view(), .out = plain.view()});
  ASSERT_FALSE(same_bits(expected, plain));

  Tensor out = rows();
  for (const int32_t each : {id, second}) {
    ASSERT_EQ(forward(layer_.get(), out, &each), CONCLAVE_OK) << conclave_last_error_message();
    EXPECT_TRUE(same_bits(out, expected));
  }
  const int32_t none = -1;
  ASSERT_EQ(forward(layer_.get(), out, &none), CONCLAVE_OK);
  EXPECT_TRUE(same_bits(out, plain));
  std::vector<int64_t> ids(kTokens, -1);
  ids[2] = second;
  const conclave_tensor id_view = tensor_of({ids.data(), DType::kI64, {kTokens}});
  ASSERT_EQ(forward(layer_.get(), out, nullptr, &id_view), CONCLAVE_OK);
  for (int64_t i = 0; i < kTokens * spec_.hidden_size; ++i) {
    const Tensor& of = i / spec_.hidden_size == 2 ? expected : plain;
    ASSERT_EQ(out.as<float>()[i], of.as<float>()[i]) << i;
  }

  const std::string list = testing::text_by(&conclave_layer_adapters_json, layer_.get());
  EXPECT_NE(list.find("\"id\": 1"), std::string::npos) << list;
  auto stats = sized<conclave_layer_stats>();
  ASSERT_EQ(conclave_layer_get_stats(layer_.get(), &stats), CONCLAVE_OK);
  EXPECT_EQ(stats.num_adapters, 2);
  EXPECT_GT(stats.adapter_bytes, 0U);
  ASSERT_EQ(conclave_layer_remove_adapter(layer_.get(), id), CONCLAVE_OK);
  expect_error(conclave_layer_remove_adapter(layer_.get(), id), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "id");
  expect_error(forward(layer_.get(), out, &id), CONCLAVE_ERROR_INVALID_ARGUMENT, "adapter");
  expect_error(forward(layer_.get(), out, &second, &id_view), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "adapter");
}

// Factors of one expert's up and down product in the caller's memory.
struct Factors {
  explicit Factors(const MoeSpec& spec)
      : a(random_tensor(DType::kF32, 4, spec.hidden_size, 5)),
        b(random_tensor(DType::kBF16, spec.intermediate_size, 4, 6)),
        down_a(random_tensor(DType::kF32, 3, spec.intermediate_size, 7)),
        down_b(random_tensor(DType::kF32, spec.hidden_size, 3, 8)) {
    views = {tensor_of(a.const_view()), tensor_of(b.const_view()), tensor_of(down_a.const_view()),
             tensor_of(down_b.const_view())};
    list[0] = factors(CONCLAVE_WEIGHT_MATRIX_UP, 1, 0.25);
    list[0].a = &views[0];
    list[0].b = &views[1];
    list[1] = factors(CONCLAVE_WEIGHT_MATRIX_DOWN, 2, 0.5);
    list[1].a = &views[2];
    list[1].b = &views[3];
  }
  static conclave_lora_factors factors(int32_t matrix, int64_t expert, double scale) {
    auto of_matrix = sized<conclave_lora_factors>();
    of_matrix.matrix = matrix;
    of_matrix.expert = expert;
    of_matrix.scale = scale;
    return of_matrix;
  }
  conclave_lora_adapter adapter() const {
    auto adapter = sized<conclave_lora_adapter>();
    adapter.name = "mine";
    adapter.factors = list;
    adapter.num_factors = 2;
    return adapter;
  }
  LoraAdapter cpp_adapter() const {
    return {.name = "mine",
            .factors = {{.matrix = WeightMatrix::kUp,
                         .expert = 1,
                         .a = a.const_view(),
                         .b = b.const_view(),
                         .scale = 0.25},
                        {.matrix = WeightMatrix::kDown,
                         .expert = 2,
                         .a = down_a.const_view(),
                         .b = down_b.const_view(),
                         .scale = 0.5}}};
  }

  Tensor a, b, down_a, down_b;
  std::vector<conclave_tensor> views;
  conclave_lora_factors list[2] = {};
};

TEST_F(Adapters, InMemory_HaveTheBitsOfCpp) {
  Tensor expected = rows();
  Tensor out = rows();
  int32_t id = -1;
  {
    const Factors factors(spec_);
    cpp_layer_.add_adapter(factors.cpp_adapter());
    const conclave_lora_adapter adapter = factors.adapter();
    ASSERT_EQ(conclave_layer_add_adapter(layer_.get(), &adapter, &id), CONCLAVE_OK)
        << conclave_last_error_message();
  }
  cpp_layer_.forward({.hidden = hidden_.const_view(), .adapter = 0, .out = expected.view()});
  ASSERT_EQ(forward(layer_.get(), out, &id), CONCLAVE_OK);
  EXPECT_TRUE(same_bits(out, expected));
  EXPECT_NE(testing::text_by(&conclave_layer_adapters_json, layer_.get()).find("\"mine\""),
            std::string::npos);
  // Layers on the same weights share adapters, and outlive each other in any order.
  auto other = make<conclave_layer>(&conclave_layer_with_max_tokens, layer_.get(), int64_t{8});
  layer_.reset();
  context_.reset();
  checkpoint_.reset();
  ASSERT_EQ(forward(other.get(), out, &id), CONCLAVE_OK);
  EXPECT_TRUE(same_bits(out, expected));
}

TEST_F(Adapters, BytesOfAll_AreTheirSum) {
  const Factors factors(spec_);
  conclave_lora_adapter adapter = factors.adapter();
  int32_t id = -1;
  ASSERT_EQ(conclave_layer_add_adapter(layer_.get(), &adapter, &id), CONCLAVE_OK);
  adapter.num_factors = 1;
  ASSERT_EQ(conclave_layer_add_adapter(layer_.get(), &adapter, &id), CONCLAVE_OK);
  const auto list =
      nlohmann::json::parse(testing::text_by(&conclave_layer_adapters_json, layer_.get()));
  auto stats = sized<conclave_layer_stats>();
  ASSERT_EQ(conclave_layer_get_stats(layer_.get(), &stats), CONCLAVE_OK);
  EXPECT_EQ(stats.adapter_bytes, list[0]["bytes"].get<size_t>() + list[1]["bytes"].get<size_t>());
}

// Stacked factors of gate and up, whose rows come one after the other or take turns.
TEST_F(Adapters, TheOrderOfGateAndUp_IsTheCallers) {
  const std::filesystem::path folder =
      std::filesystem::path(::testing::TempDir()) / "capi_adapter_order";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "adapter_config.json")
      << R"({"peft_type": "LORA", "peft_version": "0.21.2", "r": 2, "lora_alpha": 2})";
  const int64_t ranks = 2 * spec_.num_experts;
  const Tensor a = random_tensor(DType::kF32, ranks, spec_.hidden_size, 21);
  const Tensor b = random_tensor(DType::kF32, 2 * spec_.intermediate_size, ranks, 22);
  const std::string layer = "base_model.model.model.layers.0.";
  const std::vector<NamedTensor> tensors = {
      {layer + "mlp.experts.lora_A.weight", a.const_view()},
      {layer + "mlp.experts.lora_B.weight", b.const_view()},
      {layer + "self_attn.q_proj.lora_A.weight", a.const_view()},
      {layer + "self_attn.v_proj.lora_A.weight", a.const_view()}};
  save_safetensors(folder / "adapter_model.safetensors", tensors);
  const auto adapters =
      make<conclave_lora_checkpoint>(&conclave_lora_checkpoint_open, folder.c_str());
  auto info = sized<conclave_lora_checkpoint_info>();
  ASSERT_EQ(conclave_lora_checkpoint_get_info(adapters.get(), &info), CONCLAVE_OK);
  EXPECT_EQ(info.num_layers, 1U);
  ASSERT_EQ(info.num_others, 2U);
  const char* name = nullptr;
  ASSERT_EQ(conclave_lora_checkpoint_other_at(adapters.get(), 1, &name), CONCLAVE_OK);
  EXPECT_STREQ(name, "model.layers.0.self_attn.v_proj");

  const LoraCheckpoint cpp_adapters = LoraCheckpoint::open(folder);
  Tensor before = rows();
  for (const auto& [order, cpp_order] :
       {std::pair{CONCLAVE_GATE_UP_ORDER_CONCATENATED, GateUpOrder::kConcatenated},
        std::pair{CONCLAVE_GATE_UP_ORDER_INTERLEAVED, GateUpOrder::kInterleaved}}) {
    int32_t id = -1;
    ASSERT_EQ(conclave_layer_add_adapter_from_checkpoint(layer_.get(), adapters.get(), 0, nullptr,
                                                         order, &id),
              CONCLAVE_OK)
        << conclave_last_error_message();
    Tensor expected = rows();
    cpp_layer_.forward({.hidden = hidden_.const_view(),
                        .adapter = cpp_layer_.add_adapter(cpp_adapters.layer(0, spec_, cpp_order)),
                        .out = expected.view()});
    Tensor out = rows();
    ASSERT_EQ(forward(layer_.get(), out, &id), CONCLAVE_OK);
    EXPECT_TRUE(same_bits(out, expected));
    EXPECT_FALSE(same_bits(out, before));
    before = std::move(out);
  }
  std::filesystem::remove_all(folder);
}

TEST_F(Adapters, FactorsOfANewerProgram_AreTakenByTheirOwnStride) {
  struct Newer {
    conclave_lora_factors known;
    int64_t more;
  };
  const Factors factors(spec_);
  Newer list[2] = {{factors.list[0], 0}, {factors.list[1], 0}};
  list[0].known.struct_size = list[1].known.struct_size = sizeof(Newer);
  conclave_lora_adapter adapter = factors.adapter();
  adapter.factors = &list[0].known;
  int32_t id = -1;
  ASSERT_EQ(conclave_layer_add_adapter(layer_.get(), &adapter, &id), CONCLAVE_OK)
      << conclave_last_error_message();
  cpp_layer_.add_adapter(factors.cpp_adapter());
  Tensor expected = rows();
  Tensor out = rows();
  cpp_layer_.forward({.hidden = hidden_.const_view(), .adapter = 0, .out = expected.view()});
  ASSERT_EQ(forward(layer_.get(), out, &id), CONCLAVE_OK);
  EXPECT_TRUE(same_bits(out, expected));
  list[1].more = 1;
  expect_error(conclave_layer_add_adapter(layer_.get(), &adapter, &id), CONCLAVE_ERROR_UNSUPPORTED,
               "factors[1]");
  list[1].more = 0;
  list[1].known.struct_size = sizeof(conclave_lora_factors);
  expect_error(conclave_layer_add_adapter(layer_.get(), &adapter, &id),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "factors[1].struct_size");
}

TEST_F(Adapters, BadAdapters_NameTheFactor_AndAreNotAdded) {
  struct Case {
    conclave_status status;
    const char* names;
    void (*spoil)(Factors& factors, conclave_lora_adapter& adapter);
  };
  const Case cases[] = {
      {CONCLAVE_ERROR_NULL_POINTER, "factors[1].a", [](auto& f, auto&) { f.list[1].a = nullptr; }},
      {CONCLAVE_ERROR_NULL_POINTER, "factors[0].b", [](auto& f, auto&) { f.list[0].b = nullptr; }},
      {CONCLAVE_ERROR_INVALID_ARGUMENT, "factors[0].scale",
       [](auto& f, auto&) { f.list[0].scale = 0; }},
      {CONCLAVE_ERROR_TENSOR_VALUE, "scale",
       [](auto& f, auto&) { f.list[0].scale = std::numeric_limits<double>::quiet_NaN(); }},
      {CONCLAVE_ERROR_INVALID_ARGUMENT, "factors[0].mlp",
       [](auto& f, auto&) { f.list[0].mlp = 2; }},
      {CONCLAVE_ERROR_INVALID_ARGUMENT, "factors[1].matrix",
       [](auto& f, auto&) { f.list[1].matrix = -1; }},
      {CONCLAVE_ERROR_INVALID_ARGUMENT, "expert",
       [](auto& f, auto&) { f.list[0].expert = int64_t{1} << 40; }},
      {CONCLAVE_ERROR_INVALID_ARGUMENT, "expert", [](auto& f, auto&) { f.list[0].expert = -1; }},
      {CONCLAVE_ERROR_SHAPE, "", [](auto& f, auto&) { f.views[0].shape[1] -= 1; }},
      {CONCLAVE_ERROR_SHAPE, "", [](auto& f, auto&) { f.views[0].rank = 1; }},
      {CONCLAVE_ERROR_DTYPE, "", [](auto& f, auto&) { f.views[0].dtype = CONCLAVE_DTYPE_I32; }},
      {CONCLAVE_ERROR_MISALIGNED, "",
       [](auto& f, auto&) { f.views[0].data = static_cast<char*>(f.views[0].data) + 1; }},
      {CONCLAVE_ERROR_TENSOR_VALUE, "",
       [](auto& f, auto&) {
         f.a.template as<float>()[3] = std::numeric_limits<float>::infinity();
       }},
      {CONCLAVE_ERROR_TENSOR_DUPLICATE, "", [](auto& f, auto&) { f.list[1] = f.list[0]; }},
      {CONCLAVE_ERROR_INVALID_ARGUMENT, "num_factors",
       [](auto&, auto& a) { a.num_factors = ~size_t{0} / 2; }},
      {CONCLAVE_ERROR_NULL_POINTER, "factors", [](auto&, auto& a) { a.factors = nullptr; }},
      {CONCLAVE_ERROR_INVALID_ARGUMENT, "struct_size", [](auto&, auto& a) { a.struct_size = 9; }},
      {CONCLAVE_ERROR_MISALIGNED, "factors",
       [](auto&, auto& a) {
         a.factors = reinterpret_cast<const conclave_lora_factors*>(
             reinterpret_cast<const char*>(a.factors) + 4);
       }},
  };
  for (const Case& bad : cases) {
    SCOPED_TRACE(std::string(bad.names) + " " + conclave_status_name(bad.status));
    Factors factors(spec_);
    conclave_lora_adapter adapter = factors.adapter();
    bad.spoil(factors, adapter);
    int32_t id = 77;
    expect_error(conclave_layer_add_adapter(layer_.get(), &adapter, &id), bad.status, bad.names);
    EXPECT_EQ(id, 77);
  }
  auto stats = sized<conclave_layer_stats>();
  ASSERT_EQ(conclave_layer_get_stats(layer_.get(), &stats), CONCLAVE_OK);
  EXPECT_EQ(stats.num_adapters, 0);
}

TEST_F(Adapters, LayersWithoutRoom_AndBadRanks_SaySo) {
  const Factors factors(spec_);
  const conclave_lora_adapter adapter = factors.adapter();
  int32_t id = -1;
  const auto without = make_layer(0);
  expect_error(conclave_layer_add_adapter(without.get(), &adapter, &id), CONCLAVE_ERROR_STATE,
               "max_adapter_rank");
  const auto small = make_layer(3);
  EXPECT_NE(conclave_layer_add_adapter(small.get(), &adapter, &id), CONCLAVE_OK);
  for (const int64_t rank : {int64_t{-1}, int64_t{513}, (int64_t{1} << 32) + 16}) {
    auto options = sized<conclave_layer_options>();
    options.max_adapter_rank = rank;
    conclave_layer* out = nullptr;
    expect_error(conclave_layer_create_from_checkpoint(context_.get(), checkpoint_.get(), 0,
                                                       &options, nullptr, &out),
                 CONCLAVE_ERROR_INVALID_ARGUMENT, "max_adapter_rank");
  }
}

TEST_F(Adapters, BadDirectories_AreTypedErrors) {
  conclave_lora_checkpoint* out = nullptr;
  expect_error(conclave_lora_checkpoint_open("testdata/no-such", &out),
               CONCLAVE_ERROR_FILE_NOT_FOUND, "no-such");
  EXPECT_EQ(out, nullptr);
  const auto adapters = open_adapters();
  const char* name = nullptr;
  expect_error(conclave_lora_checkpoint_other_at(adapters.get(), ~size_t{0}, &name),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "position");
  int32_t id = 5;
  expect_error(conclave_layer_add_adapter_from_checkpoint(layer_.get(), adapters.get(), 99,
                                                          checkpoint_.get(), 0, &id),
               CONCLAVE_ERROR_LAYER_NOT_FOUND, "99");
  expect_error(
      conclave_layer_add_adapter_from_checkpoint(layer_.get(), adapters.get(), 0, nullptr, 17, &id),
      CONCLAVE_ERROR_INVALID_ARGUMENT, "order");
  EXPECT_EQ(id, 5);
}

// Adapters come and go beside forwards of other threads, which see them or do not.
TEST_F(Adapters, ComeAndGo_BesideForwards) {
  Tensor plain = rows();
  ASSERT_EQ(forward(layer_.get(), plain, nullptr), CONCLAVE_OK);
  std::atomic<bool> is_done = false;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 2; ++thread) {
    threads.emplace_back([&] {
      size_t bytes = 0;
      EXPECT_EQ(conclave_layer_workspace_bytes(layer_.get(), -1, &bytes), CONCLAVE_OK);
      const auto workspace = make<conclave_workspace>(&conclave_workspace_create, context_.get(),
                                                      bytes, static_cast<void*>(nullptr));
      Tensor out = rows();
      while (!is_done) {
        EXPECT_EQ(forward(layer_.get(), out, nullptr, nullptr, workspace.get()), CONCLAVE_OK)
            << conclave_last_error_message();
        EXPECT_TRUE(same_bits(out, plain));
      }
    });
  }
  const Factors factors(spec_);
  const conclave_lora_adapter adapter = factors.adapter();
  for (int32_t round = 0; round < 6; ++round) {
    int32_t id = -1;
    EXPECT_EQ(conclave_layer_add_adapter(layer_.get(), &adapter, &id), CONCLAVE_OK);
    EXPECT_EQ(id, round);
    EXPECT_EQ(conclave_layer_remove_adapter(layer_.get(), id), CONCLAVE_OK);
  }
  is_done = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace conclave
