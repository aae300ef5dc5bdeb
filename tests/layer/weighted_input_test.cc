// Layers whose experts read weighted rows that are wider than one block of the conversion.
#include "support/layer_parts.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::make_layer;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;

constexpr int64_t kTokens = 4;

MoeSpec weighted(DType weights, int64_t hidden) {
  MoeSpec spec = testing::make_spec(3, 1, hidden, 33, weights);
  if (weights == DType::kF8E4M3) spec.quant.weights = WeightScale::kChannel;
  spec.weight_on = WeightOn::kInput;
  spec.router = {.score = RouterScore::kSigmoid,
                 .order = RouterOrder::kTopkThenScore,
                 .renormalize = Renormalize::kNone};
  return spec;
}

class WeightedInput : public ::testing::TestWithParam<std::string> {};

TEST_P(WeightedInput, EveryTypeBeyondOneBlock_IsWithinTheBarOfFloat64) {
  for (const DType weights : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3}) {
    for (const int64_t hidden_size : {255, 256, 257, 384, 511, 512, 513, 520}) {
      const OwnedLayer owned =
          make_layer(weighted(weights, hidden_size), {.max_tokens = 3}, {.isa = GetParam()});
      for (const DType rows : {DType::kF32, DType::kF16, DType::kBF16}) {
        SCOPED_TRACE(std::string(to_string(weights)) + " weights, " + std::string(to_string(rows)) +
                     " rows of " + std::to_string(hidden_size));
        const Tensor hidden = random_tensor(rows, kTokens, hidden_size, 7);
        const auto output = run_layer(owned.layer, hidden.view(), DType::kF32);
        const StageCheck check = check_against_reference(
            *owned.context, owned.layer.spec(), *owned.source, output.result(hidden.view()));
        EXPECT_EQ(check.routing_mismatches, 0);
        EXPECT_LE(check.worst_token_error, accuracy_bar(weights, DType::kF32));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, WeightedInput, ::testing::ValuesIn(testing::usable_isas()),
                         [](const auto& row) { return row.param; });

}  // namespace
}  // namespace conclave
