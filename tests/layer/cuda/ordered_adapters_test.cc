// Adapters on a GPU of experts whose columns have an order or factors, against float64.
#include "adapted_layer.h"
#include "layer/cuda/ordered_source.h"

#include "conclave/refit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

class CudaOrderedAdapters : public CudaLayerTest {};

QuantSpec ordered_groups(int64_t columns, WeightZero zeros = WeightZero::kNone) {
  QuantSpec quant{
      .weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns, .zeros = zeros};
  quant.has_column_order = true;
  return quant;
}

struct OrderedForm {
  std::string name;
  DType dtype;
  QuantSpec quant;
};
std::vector<OrderedForm> ordered_forms() {
  return {{"int4", DType::kI4, ordered_groups(128)},
          {"int4, zero points", DType::kI4, ordered_groups(32, WeightZero::kPoint)},
          {"nf4", DType::kNF4, ordered_groups(64)},
          {"int8, offsets", DType::kI8, ordered_groups(64, WeightZero::kOffset)},
          {"e4m3", DType::kF8E4M3, ordered_groups(32)}};
}
// Rows times factors are two terms of bf16, those of a stage of columns one behind the other.
std::vector<OrderedForm> scaled_forms() {
  std::vector<OrderedForm> forms = {{"int4, in order", DType::kI4, ordered_groups(32)},
                                    {"int4", DType::kI4, ordered_groups(128)},
                                    {"nf4", DType::kNF4, ordered_groups(64)},
                                    {"int8", DType::kI8, {.weights = WeightScale::kChannel}}};
  for (OrderedForm& form : forms) {
    form.quant.has_column_factors = true;
    form.quant.has_column_order = form.name == "int4, in order";
  }
  return forms;
}

// Shapes that no block divides, and every part that reads rows or makes them.
std::vector<MoeSpec> ordered_specs(const OrderedForm& form) {
  MoeSpec odd = make_spec(5, 2, 127, 65, form.dtype);
  MoeSpec wide = make_spec(5, 3, 264, 392, form.dtype);
  wide.has_bias = true;
  MoeSpec shared = make_spec(6, 2, 264, 136, form.dtype);
  shared.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 272};
  MoeSpec two_shared = make_spec(6, 2, 136, 72, form.dtype);
  two_shared.shared = {.mode = SharedMode::kFusedSlots, .intermediate_size = 72, .count = 2};
  MoeSpec plain = make_spec(5, 2, 136, 72, form.dtype);
  plain.activation = {.name = "relu2_no_mul"};
  std::vector<MoeSpec> specs = {odd, wide, shared, two_shared, plain};
  for (MoeSpec& spec : specs) spec.quant = form.quant;
  return specs;
}

const AdapterChoice kFirst{.rank = 16, .dtype = DType::kBF16};
const AdapterChoice kSecond{.rank = 5, .every = 2, .fused = true};

void expect_within_the_bar(const OrderedForm& form, Orders orders) {
  for (const MoeSpec& spec : ordered_specs(form)) {
    const int64_t columns = std::min(spec.hidden_size, spec.intermediate_size);
    // It moves columns to a second group.
    if (orders == Orders::kUneven && columns <= form.quant.block_cols) continue;
    SCOPED_TRACE(form.name + ", orders " + std::to_string(static_cast<int>(orders)) + ", H" +
                 std::to_string(spec.hidden_size) + " I" + std::to_string(spec.intermediate_size));
    AdaptedLayer layer(spec, source_for(spec, orders), kFirst, kSecond, {.max_tokens = 64});
    for (const int64_t tokens : {1, 5, 40}) {
      EXPECT_LE(layer.worst_error(tokens), bar_of(spec)) << "T" << tokens;
    }
  }
}

TEST_F(CudaOrderedAdapters, EveryFormAndOrder_IsWithinTheBar) {
  for (const OrderedForm& form : ordered_forms()) {
    for (const Orders orders : {Orders::kApart, Orders::kAlike, Orders::kUneven}) {
      expect_within_the_bar(form, orders);
    }
  }
}

TEST_F(CudaOrderedAdapters, FactorsOfColumns_AreWithinTheBar) {
  for (const OrderedForm& form : scaled_forms()) {
    for (const Orders orders : {Orders::kApart, Orders::kAlike}) {
      if (!form.quant.has_column_order && orders == Orders::kAlike) continue;
      expect_within_the_bar(form, orders);
    }
  }
  // The kernel that adds terms beside factors finds scales by itself.
  const OrderedForm ordered = scaled_forms().front();
  const MoeSpec spec = ordered_specs(ordered).front();
  EXPECT_EQ(code_of([&] {
              DeviceLayer(spec, source_for(spec, Orders::kUneven), {.max_adapter_rank = 8});
            }),
            ErrorCode::kUnsupported);
}

// Projections leave rows of float32, which are two terms too.
TEST_F(CudaOrderedAdapters, LatentLayersOfCodes_AreWithinTheBar) {
  for (const DType dtype : {DType::kI4, DType::kI8}) {
    MoeSpec spec = make_spec(5, 2, 328, 168, dtype);
    spec.latent = {.size = 296};
    spec.quant = ordered_groups(32);
    for (const bool has_order : {false, true}) {
      spec.quant.has_column_order = has_order;
      SCOPED_TRACE(std::string(to_string(dtype)) + (has_order ? ", in order" : ""));
      AdaptedLayer layer(spec, kFirst, kSecond, {.max_tokens = 64});
      for (const int64_t tokens : {1, 5, 40}) {
        EXPECT_LE(layer.worst_error(tokens), bar_of(spec)) << "T" << tokens;
      }
    }
  }
}

// A slice's order counts from its first column.
TEST_F(CudaOrderedAdapters, Slices_AddUpToTheWhole) {
  constexpr int64_t kTokens = 21;
  for (const int32_t ranks : {2, 3}) {
    MoeSpec spec = make_spec(6, 2, 136, 96 * ranks, DType::kI4);
    spec.quant = ordered_groups(32);
    std::vector<LayerOutput> parts;
    std::optional<AdaptedLayer> last;
    for (int32_t rank = 0; rank < ranks; ++rank) {
      last.emplace(spec, source_for(spec, Orders::kApart), kFirst, kSecond,
                   LayerOptions{.max_tokens = 32},
                   ParallelSpec{.tp_size = ranks, .tp_rank = rank, .reduce = Reduce::kPartial});
      parts.push_back(last->run_in_turn(last->hidden(kTokens)));
    }
    LayerOutput& total = parts.back();
    for (size_t part = 0; part + 1 < parts.size(); ++part) {
      for (int64_t i = 0; i < kTokens * spec.hidden_size; ++i) {
        total.out.as<float>()[i] += parts[part].out.as<float>()[i];
      }
    }
    EXPECT_LE(last->error_of(last->hidden(kTokens), total), bar_of(spec)) << ranks << " slices";
  }
}

// Tokens without an adapter keep every bit, and an adapter that has gone leaves nothing.
TEST_F(CudaOrderedAdapters, TokensWithoutOne_KeepTheirBits) {
  MoeSpec spec = make_spec(5, 2, 264, 136, DType::kI4);
  spec.quant = ordered_groups(32);
  DeviceLayer without(spec, source_for(spec, Orders::kApart), {.max_tokens = 64});
  AdaptedLayer adapted(spec, source_for(spec, Orders::kApart), kFirst, kSecond, {.max_tokens = 64});
  for (const int64_t tokens : {1, 3, 48}) {
    const Tensor hidden = adapted.hidden(tokens);
    DeviceForward forward(without, hidden.view(), DType::kF32);
    forward.enqueue();
    const Tensor expected = forward.out();
    const Tensor out = adapted.run_in_turn(hidden).out;
    for (int64_t token = 1; token < tokens; token += 3) {
      EXPECT_EQ(row_bytes(out, token), row_bytes(expected, token)) << token << " of " << tokens;
    }
    EXPECT_TRUE(same_bits(adapted.run(hidden, kNoAdapter).out, expected)) << "T" << tokens;
  }
}

// The factors lie in the order of the weights' columns, which other weights would change.
TEST_F(CudaOrderedAdapters, WeightsOfAdaptedExperts_StayUntilTheAdaptersHaveGone) {
  MoeSpec spec = make_spec(5, 2, 264, 136, DType::kI4);
  spec.quant = ordered_groups(32);
  AdaptedLayer adapted(spec, source_for(spec, Orders::kApart), kFirst, kSecond, {.max_tokens = 64});
  MoeLayer& layer = adapted.layer();
  const auto other = source_for(spec, Orders::kApart, 12);
  for (const ReloadMode mode : {ReloadMode::kStaged, ReloadMode::kInPlace}) {
    EXPECT_EQ(code_of([&] { layer.reload(*other, mode); }), ErrorCode::kState);
  }
  EXPECT_EQ(code_of([&] { Refit{layer}; }), ErrorCode::kState);
  EXPECT_EQ(code_of([&] { Refit{layer, {.scope = {.experts = {2}}}}; }), ErrorCode::kState);
  EXPECT_LE(adapted.worst_error(40), bar_of(spec));  // nothing has changed
  {
    Refit router(layer, {.scope = {.tensors = {weights::kRouter}}});  // has no columns of experts
    router.stage(*other);
    EXPECT_EQ(code_of([&] { layer.add_adapter(adapted.adapters()[0]); }), ErrorCode::kState);
  }
  for (const int32_t id : adapted.ids()) layer.remove_adapter(id);
  layer.reload(*other, ReloadMode::kStaged);
  // Packed anew, they lie in the order of the new weights.
  AdaptedLayer fresh(spec, source_for(spec, Orders::kApart, 12), kFirst, kSecond,
                     {.max_tokens = 64});
  const int32_t id = layer.add_adapter(adapted.adapters()[0]);
  const Tensor hidden = adapted.hidden(40);
  EXPECT_TRUE(same_bits(adapted.run(hidden, id).out, fresh.run(hidden, fresh.ids()[0]).out));
}

}  // namespace
}  // namespace conclave::testing
