// N1 at the sizes of published models: few experts and tokens, but whole matrices.

#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <string>

namespace conclave {
namespace {

using testing::make_layer;
using testing::make_spec;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;

struct ModelShape {
  const char* name;
  int64_t hidden;
  int64_t intermediate;
  bool weight_on_input = false;  // one expert per token reads its weighted row
};
constexpr ModelShape kShapes[] = {{"qwen3_30b_a3b", 2048, 768},
                                  {"qwen3_235b_a22b", 4096, 1536},
                                  {"olmoe", 2048, 1024},
                                  {"gpt_oss", 2880, 2880},
                                  {"deepseek_v3", 7168, 2048},
                                  // 8192 columns are sliced over eight ranks.
                                  {"llama4", 5120, 1024, true}};

MoeSpec spec_of(const ModelShape& shape) {
  MoeSpec spec = make_spec(2, 2, shape.hidden, shape.intermediate, DType::kBF16);
  if (!shape.weight_on_input) return spec;
  spec.top_k = 1;
  spec.weight_on = WeightOn::kInput;
  spec.router = {.score = RouterScore::kSigmoid,
                 .order = RouterOrder::kTopkThenScore,
                 .renormalize = Renormalize::kNone};
  return spec;
}

class ProductionShape : public ::testing::TestWithParam<ModelShape> {};

TEST_P(ProductionShape, EveryRow_IsWithinTheBar) {
  const ModelShape& shape = GetParam();
  const MoeSpec spec = spec_of(shape);
  const Tensor hidden = random_tensor(DType::kBF16, 7, shape.hidden, 1);
  for (const std::string& isa : testing::usable_isas()) {
    const OwnedLayer owned = make_layer(spec, {.max_tokens = 7}, {.isa = isa});
    const auto output = run_layer(owned.layer, hidden.view(), DType::kBF16);
    const StageCheck check =
        check_against_reference(*owned.context, spec, *owned.source, output.result(hidden.view()));
    EXPECT_LE(check.worst_token_error, accuracy_bar(DType::kBF16, DType::kBF16)) << isa;
    EXPECT_EQ(check.routing_mismatches, 0) << isa;
    RecordProperty("worst_" + isa, std::to_string(check.worst_token_error));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ProductionShape, ::testing::ValuesIn(kShapes),
                         [](const auto& row) { return std::string(row.param.name); });

}  // namespace
}  // namespace conclave
