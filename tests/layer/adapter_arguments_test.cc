// Adapters that do not fit, and calls that name none of the layer's.
#include "layer/adapters/adapter_set.h"
#include "layer/random_adapter.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <span>

namespace conclave::testing {
namespace {

MoeSpec small_spec() { return make_spec(4, 2, 40, 24, DType::kF32); }

struct Wrong {
  const char* name;
  std::function<void(LoraAdapter&)> spoil;
  ErrorCode code;
  std::string text;  // that the error holds
};

Tensor& spare() {
  static Tensor tensor(DType::kF32, {600, 600});
  return tensor;
}

ConstTensorView view(int64_t rows, int64_t cols) {
  return {.data = spare().as<float>(), .dtype = DType::kF32, .shape = {rows, cols}};
}

TEST(AdapterArguments, WhatDoesNotFit_IsNamed) {
  Tensor nan(DType::kF32, {8, 40});
  nan.as<float>()[43] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<Wrong> wrongs = {
      {"empty", [](LoraAdapter& a) { a.factors.clear(); }, ErrorCode::kInvalidArgument, "no fact"},
      {"rank 0", [](LoraAdapter& a) { a.factors[0].a = view(0, 40); }, ErrorCode::kInvalidArgument,
       "1 to 16"},
      {"rank 17", [](LoraAdapter& a) { a.factors[0].a = view(17, 40); },
       ErrorCode::kInvalidArgument, "17"},
      {"ranks differ", [](LoraAdapter& a) { a.factors[0].b = view(24, 7); }, ErrorCode::kShape,
       "[24, 8]"},
      {"another model", [](LoraAdapter& a) { a.factors[0].a = view(8, 41); }, ErrorCode::kShape,
       "[8, 40]"},
      {"one dimension", [](LoraAdapter& a) { a.factors[0].a.shape = {320}; }, ErrorCode::kShape,
       "[320]"},
      {"no data", [](LoraAdapter& a) { a.factors[0].b.data = nullptr; }, ErrorCode::kNullPointer,
       "lora_B"},
      {"type", [](LoraAdapter& a) { a.factors[0].b.dtype = DType::kI32; }, ErrorCode::kDType,
       "I32"},
      {"stride", [](LoraAdapter& a) { a.factors[0].a.row_stride = 3; }, ErrorCode::kStride, "3"},
      {"expert", [](LoraAdapter& a) { a.factors[0].expert = 4; }, ErrorCode::kInvalidArgument,
       "4 experts"},
      {"negative", [](LoraAdapter& a) { a.factors[0].expert = -1; }, ErrorCode::kInvalidArgument,
       "-1"},
      {"shared", [](LoraAdapter& a) { a.factors[0].mlp = WeightMlp::kShared; },
       ErrorCode::kInvalidArgument, "0 experts"},
      {"residual", [](LoraAdapter& a) { a.factors[0].mlp = WeightMlp::kResidual; },
       ErrorCode::kUnsupported, "residual"},
      {"twice", [](LoraAdapter& a) { a.factors[1] = a.factors[0]; }, ErrorCode::kTensorDuplicate,
       "gate of expert 0"},
      {"NaN", [&](LoraAdapter& a) { a.factors[0].a = nan.const_view(); }, ErrorCode::kTensorValue,
       "[1, 3]"},
      {"scale", [](LoraAdapter& a) { a.factors[0].scale = 1e300; }, ErrorCode::kTensorValue,
       "scale"},
  };
  const OwnedLayer owned = make_layer(small_spec(), {.max_adapter_rank = 16});
  MoeLayer layer = owned.layer.with_max_tokens(8);
  for (const Wrong& wrong : wrongs) {
    SCOPED_TRACE(wrong.name);
    LoraAdapter adapter = random_adapter(small_spec(), {.rank = 8});
    adapter.name = "adapter_model.safetensors";
    wrong.spoil(adapter);
    try {
      layer.add_adapter(adapter);
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), wrong.code) << error.what();
      const std::string text = error.what();
      EXPECT_NE(text.find(wrong.text), std::string::npos) << text;
      EXPECT_NE(text.find("adapter_model.safetensors"), std::string::npos) << text;
    }
    EXPECT_TRUE(layer.adapters().empty());
  }
}

TEST(AdapterArguments, LayersWithoutRoom_RefuseThem) {
  const OwnedLayer owned = make_layer(small_spec());
  MoeLayer layer = owned.layer.with_max_tokens(8);
  const LoraAdapter adapter = random_adapter(small_spec(), {.rank = 8});
  EXPECT_EQ(code_of([&] { layer.add_adapter(adapter); }), ErrorCode::kState);
  for (const int32_t rank : {-1, kMostAdapterRank + 1}) {
    EXPECT_EQ(code_of([&] { make_layer(small_spec(), {.max_adapter_rank = rank}); }),
              ErrorCode::kInvalidArgument);
  }
}

// On a device that takes none, ids may lie where the host cannot read.
TEST(AdapterArguments, WhereNoneAreTaken_CallsAreRefusedUnread) {
  const ConstTensorView unreadable{
      .data = reinterpret_cast<const void*>(uintptr_t{64}), .dtype = DType::kI32, .shape = {3}};
  EXPECT_FALSE(names_adapters({}));
  for (const ForwardArgs& args :
       {ForwardArgs{.adapter_ids = unreadable}, ForwardArgs{.adapter = 0}}) {
    EXPECT_TRUE(names_adapters(args));
    refuse_adapters(args, Support::yes());
    EXPECT_EQ(code_of([&] { refuse_adapters(args, Support::no("the reason")); }),
              ErrorCode::kUnsupported);
  }
}

// Two views of the same memory with other distances between rows are other factors.
TEST(AdapterArguments, ViewsFromOneAddress_AreTakenByTheirRows) {
  const MoeSpec spec = small_spec();
  const OwnedLayer owned = make_layer(spec, {.max_adapter_rank = 4});
  MoeLayer layer = owned.layer.with_max_tokens(8);
  const Tensor memory = random_tensor(DType::kF32, 8, 40, 5);
  const Tensor b = random_tensor(DType::kF32, 24, 4, 6);
  const auto every = [&](int64_t step) {
    return ConstTensorView{.data = memory.as<float>(),
                           .dtype = DType::kF32,
                           .shape = {4, 40},
                           .row_stride = 40 * step};
  };
  LoraAdapter adapter;
  for (const auto& [matrix, step] :
       {std::pair{WeightMatrix::kGate, int64_t{1}}, std::pair{WeightMatrix::kUp, int64_t{2}}}) {
    adapter.factors.push_back(
        {.matrix = matrix, .expert = 1, .a = every(step), .b = b.const_view(), .scale = 0.1});
  }
  const int32_t id = layer.add_adapter(adapter);
  const Tensor hidden = random_tensor(DType::kF32, 7, 40, 3);
  const Tensor places = id_tensor(7, {0});
  LayerResult result;
  const LayerOutput output = run_layer(layer, hidden.view(), DType::kF32, {.adapter = id});
  result = output.result(hidden.view());
  const std::vector<LoraAdapter> adapters = {adapter};
  result.adapters = adapters;
  result.adapter_ids = places.view();
  EXPECT_LE(check_against_reference(*owned.context, spec, *owned.source, result).worst_token_error,
            accuracy_bar(DType::kF32, DType::kF32));
}

TEST(AdapterArguments, UnknownIds_AreRefusedBeforeAnythingIsWritten) {
  const OwnedLayer owned = make_layer(small_spec(), {.max_adapter_rank = 8});
  MoeLayer layer = owned.layer.with_max_tokens(8);
  const Tensor hidden = random_tensor(DType::kF32, 3, 40, 3);
  const auto code = [&](const ForwardArgs& args) {
    return code_of([&] { run_layer(layer, hidden.view(), DType::kF32, args); });
  };
  EXPECT_EQ(code({.adapter = 0}), ErrorCode::kInvalidArgument);
  const Tensor none = id_tensor(3, {-1});
  EXPECT_EQ(code({.adapter_ids = none.view()}), ErrorCode{0});
  const int32_t id = layer.add_adapter(random_adapter(small_spec(), {.rank = 8}));
  EXPECT_EQ(code({.adapter = id}), ErrorCode{0});
  const Tensor wrong = id_tensor(3, {id, 7});
  EXPECT_EQ(code({.adapter_ids = wrong.view()}), ErrorCode::kInvalidArgument);
  const Tensor right = id_tensor(3, {id, -1});
  EXPECT_EQ(code({.adapter_ids = right.view()}), ErrorCode{0});
  EXPECT_EQ(code({.adapter_ids = right.view(), .adapter = id}), ErrorCode::kInvalidArgument);
  const Tensor few = id_tensor(2, {id});
  EXPECT_EQ(code({.adapter_ids = few.view()}), ErrorCode::kShape);
  EXPECT_EQ(code({.adapter_ids = hidden.view()}), ErrorCode::kDType);
  layer.remove_adapter(id);
  EXPECT_EQ(code({.adapter = id}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { layer.remove_adapter(id); }), ErrorCode::kInvalidArgument);
  // Ids are not used twice: a call with an old one never meets a new adapter.
  EXPECT_EQ(layer.add_adapter(random_adapter(small_spec(), {.rank = 8})), id + 1);
}

// Ends with its set.
struct CountedAdapter final : EngineAdapter {
  explicit CountedAdapter(int& count) : ended(count) {}
  ~CountedAdapter() override { ++ended; }
  size_t bytes() const override { return 100; }
  int& ended;
};
struct CountedTable final : EngineAdapterTable {
  explicit CountedTable(int& count) : ended(count) {}
  ~CountedTable() override { ++ended; }
  int& ended;
};

// A graph reads the whole set that it was captured with: adapters, and the table over them.
TEST(AdapterStore, SetsOfGraphs_StayUntilTheyAreForgotten) {
  int adapters_ended = 0;
  int tables_ended = 0;
  const MakeAdapterTable make_table = [&](std::span<const HeldAdapter>) {
    return std::make_shared<const CountedTable>(tables_ended);
  };
  AdapterStore store;
  const auto add = [&] {
    return store.add(LoraAdapter{}, std::make_shared<const CountedAdapter>(adapters_ended),
                     make_table);
  };
  const AdapterId first = add();
  const AdapterId second = add();
  EXPECT_EQ(tables_ended, 1);
  store.keep_for_graphs(store.current());  // {first, second}
  store.keep_for_graphs(store.current());
  EXPECT_EQ(store.graph_bytes(), 0U);
  store.remove(first, make_table);
  EXPECT_EQ(store.graph_bytes(), 100U);
  store.keep_for_graphs(store.current());  // {second}
  add();
  store.remove(second, make_table);
  EXPECT_EQ(store.graph_bytes(), 200U);
  EXPECT_EQ(adapters_ended, 0);
  EXPECT_EQ(tables_ended, 2);  // that of {second, third} too, which no graph has
  EXPECT_EQ(store.forget_graphs(), 200U);
  EXPECT_EQ(adapters_ended, 2);
  EXPECT_EQ(tables_ended, 4);
  EXPECT_EQ(store.graph_bytes(), 0U);
  EXPECT_EQ(store.forget_graphs(), 0U);
  EXPECT_EQ(store.current()->adapters.size(), 1U);
}

}  // namespace
}  // namespace conclave::testing
