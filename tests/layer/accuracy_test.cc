// N1: compares every row with float64, stage by stage, over shapes, types and token counts.

#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace conclave {
namespace {

using testing::make_layer;
using testing::make_spec;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;

// float32 products of K terms are off by at most about K rounding units of |x| |w|.
double logit_bound(const MoeSpec& spec) {
  constexpr double kFloatUnit = 0x1p-24;
  return static_cast<double>(spec.hidden_size) * kFloatUnit;
}

// The bar is two units in the last place of a float32.
constexpr double kWeightBound = 2 * 0x1p-23;

void expect_accurate(const OwnedLayer& owned, const Tensor& hidden, DType out_dtype) {
  const MoeSpec& spec = owned.layer.spec();
  const auto output = run_layer(owned.layer, hidden.view(), out_dtype);
  const StageCheck check = check_against_reference(*owned.context, spec, *owned.source,
                                                   output.result(hidden.const_view()));
  EXPECT_LE(check.worst_logit_error, logit_bound(spec));
  EXPECT_EQ(check.routing_mismatches, 0);
  EXPECT_LE(check.worst_weight_error, kWeightBound);
  EXPECT_LE(check.worst_token_error, accuracy_bar(spec.weight_dtype, out_dtype));
  EXPECT_EQ(static_cast<int64_t>(check.token_errors.size()), hidden.shape()[0]);
}

struct Case {
  int64_t experts, top_k, hidden, intermediate, tokens;
};
constexpr Case kCases[] = {{8, 2, 64, 96, 1},    {8, 2, 64, 96, 7},      {60, 4, 88, 24, 33},
                           {10, 3, 56, 36, 65},  {6, 6, 33, 31, 12},     {1, 1, 65, 63, 20},
                           {3, 1, 1, 1, 5},      {16, 8, 130, 127, 100}, {7, 5, 256, 192, 3},
                           {128, 8, 128, 48, 64}};

class Accuracy : public ::testing::TestWithParam<std::tuple<std::string, DType>> {};

TEST_P(Accuracy, EveryShape_IsWithinTheBar) {
  const auto& [isa, dtype] = GetParam();
  for (const Case& c : kCases) {
    SCOPED_TRACE(::testing::Message() << "E" << c.experts << " k" << c.top_k << " H" << c.hidden
                                      << " I" << c.intermediate << " T" << c.tokens);
    const OwnedLayer owned =
        make_layer(make_spec(c.experts, c.top_k, c.hidden, c.intermediate, dtype),
                   {.max_tokens = 64}, {.isa = isa});
    expect_accurate(owned, random_tensor(dtype, c.tokens, c.hidden, 3), dtype);
  }
}

TEST_P(Accuracy, SharedExperts_AreWithinTheBar) {
  const auto& [isa, dtype] = GetParam();
  for (const SharedMode mode : {SharedMode::kAdd, SharedMode::kSigmoidGate}) {
    MoeSpec spec = make_spec(10, 3, 56, 36, dtype);
    spec.shared = {.mode = mode, .intermediate_size = 44};
    const OwnedLayer owned = make_layer(spec, {.max_tokens = 16}, {.isa = isa});
    expect_accurate(owned, random_tensor(dtype, 37, 56, 4), dtype);
  }
}

TEST_P(Accuracy, HiddenTypeDiffersFromWeights_IsWithinTheBar) {
  const auto& [isa, dtype] = GetParam();
  const OwnedLayer owned = make_layer(make_spec(8, 2, 72, 40, dtype), {}, {.isa = isa});
  for (const DType hidden_dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    expect_accurate(owned, random_tensor(hidden_dtype, 19, 72, 5), hidden_dtype);
  }
}

std::string name_of(const ::testing::TestParamInfo<Accuracy::ParamType>& row) {
  return std::get<0>(row.param) + "_" + std::string(to_string(std::get<1>(row.param)));
}

INSTANTIATE_TEST_SUITE_P(EveryRow, Accuracy,
                         ::testing::Combine(::testing::ValuesIn(testing::usable_isas()),
                                            ::testing::Values(DType::kF32, DType::kF16,
                                                              DType::kBF16)),
                         name_of);

// The judge must detect a single wrong element and a zeroed token.
TEST(TokenErrors, PlantedFaults_AreSeen) {
  const OwnedLayer owned = make_layer(make_spec(8, 2, 64, 96, DType::kBF16));
  const Tensor hidden = random_tensor(DType::kBF16, 40, 64, 6);
  auto output = run_layer(owned.layer, hidden.view(), DType::kF32);
  const auto worst_error = [&] {
    return check_against_reference(*owned.context, owned.layer.spec(), *owned.source,
                                   output.result(hidden.view()))
        .worst_token_error;
  };
  const double bar = accuracy_bar(DType::kBF16, DType::kF32);
  ASSERT_LE(worst_error(), bar);
  float* out = output.out.as<float>();
  const std::vector<float> saved(out, out + 40 * 64);
  std::fill_n(out + 17 * 64, 64, 0.0F);
  EXPECT_GT(worst_error(), bar) << "a zeroed token";
  std::copy(saved.begin(), saved.end(), out);
  std::swap(out[5 * 64 + 3], out[6 * 64 + 3]);
  EXPECT_GT(worst_error(), bar) << "two swapped elements";
  std::copy(saved.begin(), saved.end(), out);
  out[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_GT(worst_error(), bar) << "a NaN";
}

}  // namespace
}  // namespace conclave
