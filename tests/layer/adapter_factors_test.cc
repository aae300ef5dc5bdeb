// Factors of each matrix have a scale, a rank, a type and rows of their own.
#include "layer/random_adapter.h"
#include "support/rank_grid.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

MoeSpec small_spec() { return make_spec(4, 2, 40, 24, DType::kF32); }

// The rows of `view` in memory of `stride` columns, where NaN fills what lies between them.
Tensor rows_apart(const ConstTensorView& view, int64_t stride) {
  Tensor wide(DType::kF32, {view.shape[0], stride});
  std::fill_n(wide.as<float>(), view.shape[0] * stride, std::numeric_limits<float>::quiet_NaN());
  for (int64_t row = 0; row < view.shape[0]; ++row) {
    std::copy_n(static_cast<const float*>(view.data) + row * view.shape[1], view.shape[1],
                wide.as<float>() + row * stride);
  }
  return wide;
}

ConstTensorView view_of(const Tensor& wide, int64_t columns) {
  return {.data = wide.const_view().data,
          .dtype = DType::kF32,
          .shape = {wide.shape()[0], columns},
          .row_stride = wide.shape()[1]};
}

double error_of(const MoeSpec& spec, const LoraAdapter& adapter) {
  const OwnedLayer owned = make_layer(spec, {.max_adapter_rank = 8});
  MoeLayer layer = owned.layer.with_max_tokens(8);
  const Tensor hidden = random_tensor(DType::kF32, 9, spec.hidden_size, 3);
  const LayerOutput output =
      run_layer(layer, hidden.view(), DType::kF32, {.adapter = layer.add_adapter(adapter)});
  LayerResult result = output.result(hidden.view());
  const std::vector<LoraAdapter> adapters = {adapter};
  const Tensor places = id_tensor(9, {0});
  result.adapters = adapters;
  result.adapter_ids = places.view();
  return check_against_reference(*owned.context, spec, *owned.source, result).worst_token_error;
}

TEST(AdapterFactors, ScalesOfGateAndUp_MayDiffer) {
  for (const bool fused : {false, true}) {
    LoraAdapter adapter = random_adapter(small_spec(), {.rank = 8, .fused = fused});
    for (LoraFactors& factors : adapter.factors) {
      if (factors.matrix == WeightMatrix::kUp) factors.scale *= 3;
    }
    EXPECT_LE(error_of(small_spec(), adapter), accuracy_bar(DType::kF32, DType::kF32)) << fused;
  }
}

TEST(AdapterFactors, OfOneMatrixAlone_AreAdded) {
  for (const auto only : {WeightMatrix::kGate, WeightMatrix::kUp, WeightMatrix::kDown}) {
    LoraAdapter adapter = random_adapter(small_spec(), {.rank = 8});
    std::erase_if(adapter.factors, [&](const LoraFactors& f) { return f.matrix != only; });
    EXPECT_LE(error_of(small_spec(), adapter), accuracy_bar(DType::kF32, DType::kF32));
  }
}

// Float32 beside bfloat16 keeps its bits.
TEST(AdapterFactors, TypesOfAAndB_MayDiffer) {
  const Tensor b = random_tensor(DType::kF32, 24, 8, 77);
  LoraAdapter adapter = random_adapter(small_spec(), {.rank = 8, .dtype = DType::kBF16});
  for (LoraFactors& factors : adapter.factors) {
    if (factors.matrix == WeightMatrix::kUp) factors.b = b.const_view();
  }
  EXPECT_LE(error_of(small_spec(), adapter), accuracy_bar(DType::kF32, DType::kF32));
}

TEST(AdapterFactors, TheLargestRank_IsSaid) {
  const OwnedLayer owned = make_layer(small_spec(), {.max_adapter_rank = 8});
  MoeLayer layer = owned.layer.with_max_tokens(8);
  LoraAdapter adapter = random_adapter(small_spec(), {.rank = 8});
  LoraFactors& last = adapter.factors.back();
  last.a.shape = {3, 24};
  last.b.shape = {40, 3};
  last.b.row_stride = 8;
  layer.add_adapter(adapter);
  EXPECT_EQ(layer.adapters()[0].max_rank, 8);
}

// Values between rows are nobody's; those of the last row and of the last column count.
TEST(AdapterFactors, NaN_IsFoundInEveryCorner) {
  const OwnedLayer owned = make_layer(small_spec(), {.max_adapter_rank = 8});
  MoeLayer layer = owned.layer.with_max_tokens(8);
  LoraAdapter adapter = random_adapter(small_spec(), {.rank = 8});
  LoraFactors& factors = adapter.factors[1];
  for (ConstTensorView LoraFactors::*const side : {&LoraFactors::a, &LoraFactors::b}) {
    const ConstTensorView before = factors.*side;
    const int64_t rows = before.shape[0];
    const int64_t cols = before.shape[1];
    Tensor wide = rows_apart(before, cols + 5);
    factors.*side = view_of(wide, cols);
    layer.remove_adapter(layer.add_adapter(adapter));
    for (const auto& [row, col] :
         {std::pair{int64_t{0}, int64_t{0}}, std::pair{int64_t{0}, cols - 1},
          std::pair{rows - 1, int64_t{0}}, std::pair{rows - 1, cols - 1}}) {
      float& value = wide.as<float>()[row * (cols + 5) + col];
      const float kept = std::exchange(value, std::numeric_limits<float>::quiet_NaN());
      try {
        layer.add_adapter(adapter);
        ADD_FAILURE() << "no error at " << row << ", " << col;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kTensorValue) << error.what();
        const std::string place = "[" + std::to_string(row) + ", " + std::to_string(col) + "]";
        EXPECT_NE(std::string(error.what()).find(place), std::string::npos) << error.what();
      }
      value = kept;
    }
    factors.*side = before;
  }
  EXPECT_TRUE(layer.adapters().empty());
}

TEST(AdapterFactors, AnUnknownIdOfTheLastToken_IsNamed) {
  const OwnedLayer owned = make_layer(small_spec(), {.max_adapter_rank = 8});
  MoeLayer layer = owned.layer.with_max_tokens(8);
  const int32_t id = layer.add_adapter(random_adapter(small_spec(), {.rank = 8}));
  const Tensor hidden = random_tensor(DType::kF32, 3, 40, 3);
  const Tensor ids = id_tensor(3, {id, -1, id + 1});
  try {
    run_layer(layer, hidden.view(), DType::kF32, {.adapter_ids = ids.view()});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    EXPECT_EQ(error.detail().tensor, "adapter_ids[2]");
  }
}

TEST(AdapterFactorsOfRanks, RowsThatAreApart_AreSlicedAsOthers) {
  const MoeSpec spec = small_spec();
  const LoraAdapter together = random_adapter(spec, {.rank = 8});
  LoraAdapter apart = together;
  std::vector<Tensor> kept;
  for (LoraFactors& factors : apart.factors) {
    for (ConstTensorView LoraFactors::*const side : {&LoraFactors::a, &LoraFactors::b}) {
      kept.push_back(rows_apart(factors.*side, (factors.*side).shape[1] + 3));
      factors.*side = view_of(kept.back(), (factors.*side).shape[1]);
    }
  }
  on_grid(1, 2, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    const auto source = make_synthetic_source(spec, 11);
    MoeLayer layer =
        MoeLayer::create(context, spec, *source, {.max_adapter_rank = 8}, rank.in({.tp_size = 2}));
    const Tensor hidden = random_tensor(DType::kF32, 5, 40, 3);
    const int32_t first = layer.add_adapter(together);
    const int32_t second = layer.add_adapter(apart);
    const LayerOutput expected = run_layer(layer, hidden.view(), DType::kF32, {.adapter = first});
    const LayerOutput found = run_layer(layer, hidden.view(), DType::kF32, {.adapter = second});
    EXPECT_TRUE(same_bits(found.out, expected.out));
  });
}

// What all ranks must have alike is the scale and the experts, too.
TEST(AdapterFactorsOfRanks, ScalesAndExpertsThatDiffer_AreAMismatch) {
  const MoeSpec spec = small_spec();
  const std::vector<std::function<void(LoraFactors&)>> changes = {
      [](LoraFactors& factors) { factors.scale *= 2; },
      [](LoraFactors& factors) { factors.expert = 3; }};
  for (const auto& change : changes) {
    const auto errors = run_grid(2, 1, [&](const GridRank& rank) {
      const Context context(rank.context_options());
      const auto source = make_synthetic_source(spec, 11);
      MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_adapter_rank = 8},
                                        rank.in({.ep_size = 2}));
      LoraAdapter adapter = random_adapter(spec, {.rank = 8});
      adapter.factors.resize(1);
      if (rank.ep_rank == 1) change(adapter.factors[0]);
      layer.add_adapter(adapter);
      run_layer(layer, random_tensor(DType::kF32, 4, 40, 3).view(), DType::kF32);
    });
    for (const std::exception_ptr& error : errors) {
      EXPECT_EQ(code_of([&] {
                  if (error) std::rethrow_exception(error);
                }),
                ErrorCode::kCommMismatch);
    }
  }
}

}  // namespace
}  // namespace conclave::testing
