// Tests how a choice of experts that differs from a file's is counted, and when rounding explains
// it.
#include "choices.h"

#include <gtest/gtest.h>

#include <initializer_list>

namespace conclave::tool {
namespace {

Tensor ids(std::initializer_list<std::initializer_list<int32_t>> rows) {
  const auto cols = static_cast<int64_t>(rows.begin()->size());
  Tensor tensor(DType::kI32, {static_cast<int64_t>(rows.size()), cols});
  int32_t* to = tensor.as<int32_t>();
  for (const auto& row : rows) to = std::copy(row.begin(), row.end(), to);
  return tensor;
}

Tensor row(std::initializer_list<float> values) {
  Tensor tensor(DType::kF32, {1, static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), tensor.as<float>());
  return tensor;
}

LayerRun run_with(Tensor topk_ids, Tensor logits) {
  LayerRun run;
  run.topk_ids = std::move(topk_ids);
  run.logits = std::move(logits);
  return run;
}

MoeSpec bf16_gate() {
  MoeSpec spec;
  spec.router.logits_dtype = DType::kBF16;
  return spec;
}

TEST(Choices, TokensCount_OrderApart) {
  const ChoiceDifferences differences =
      compare_choices(ids({{0, 1}, {2, 3}, {4, 5}, {6, 6}}), ids({{0, 1}, {3, 2}, {4, 1}, {6, 7}}));
  EXPECT_EQ(differences.other_experts, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(differences.reordered, 1);
}

TEST(Choices, LogitsApartByOneRounding_AreANearTie) {
  const LayerRun run = run_with(ids({{0, 1}}), row({4.0F, 1.0078125F, 1.0F, -3.0F}));
  const Tensor file_ids = ids({{0, 2}});
  EXPECT_TRUE(is_near_tie(bf16_gate(), run, nullptr, file_ids, 0));
  const Tensor close = row({4.0F, 1.0F, 1.0078125F, -3.0F});
  EXPECT_TRUE(is_near_tie(bf16_gate(), run, &close, file_ids, 0));
}

TEST(Choices, DistantExperts_AreNoTie) {
  const LayerRun run = run_with(ids({{0, 1}}), row({4.0F, 1.0F, 0.5F, -3.0F}));
  const Tensor same = row({4.0F, 1.0F, 0.5F, -3.0F});
  for (const Tensor* file_logits : {static_cast<const Tensor*>(nullptr), &same}) {
    EXPECT_FALSE(is_near_tie(bf16_gate(), run, file_logits, ids({{0, 2}}), 0));
    EXPECT_FALSE(is_near_tie(bf16_gate(), run, file_logits, ids({{0, -1}}), 0));
  }
}

TEST(Choices, FileWithOtherLogits_IsNoTie) {
  const LayerRun run = run_with(ids({{0, 1}}), row({4.0F, 1.0F, 1.0F, -3.0F}));
  const Tensor other = row({4.0F, 1.0F, 2.0F, -3.0F});
  EXPECT_FALSE(is_near_tie(bf16_gate(), run, &other, ids({{0, 2}}), 0));
}

// Rounding of a float32 gate moves a logit by far less than that of a bf16 gate.
TEST(Choices, Float32Gate_HasACloserBar) {
  const LayerRun run = run_with(ids({{0, 1}}), row({4.0F, 1.0078125F, 1.0F, -3.0F}));
  EXPECT_FALSE(is_near_tie(MoeSpec{}, run, nullptr, ids({{0, 2}}), 0));
}

TEST(Choices, BiasDecidesToo_OnlyLogitsThatMovedExplainIt) {
  MoeSpec spec = bf16_gate();
  spec.router.has_selection_bias = true;
  const LayerRun run = run_with(ids({{0, 1}}), row({4.0F, 1.0F, 0.5F, -3.0F}));
  const Tensor same = row({4.0F, 1.0F, 0.5F, -3.0F});
  const Tensor moved = row({4.0F, 1.0078125F, 0.5F, -3.0F});
  EXPECT_FALSE(is_near_tie(spec, run, nullptr, ids({{0, 2}}), 0));
  EXPECT_FALSE(is_near_tie(spec, run, &same, ids({{0, 2}}), 0));
  EXPECT_TRUE(is_near_tie(spec, run, &moved, ids({{0, 2}}), 0));
}

}  // namespace
}  // namespace conclave::tool
