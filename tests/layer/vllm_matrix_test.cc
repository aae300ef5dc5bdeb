// The rows of vLLM's kernel tests that one rank of a CPU can run: test_moe_layer.py and the fused
// shapes of test_moe.py. All tokens run; sampled ones are compared with float64.

#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::gather_rows;
using testing::LayerOutput;
using testing::make_layer;
using testing::make_spec;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;

// At most four tokens: the first, the last and two between.
std::vector<int64_t> sampled(int64_t tokens) {
  std::vector<int64_t> rows = {0};
  for (const int64_t row : {tokens / 3, 2 * tokens / 3, tokens - 1}) {
    if (row > rows.back()) rows.push_back(row);
  }
  return rows;
}

void expect_sampled_tokens_accurate(const OwnedLayer& owned, const Tensor& hidden) {
  const MoeSpec& spec = owned.layer.spec();
  const LayerOutput output = run_layer(owned.layer, hidden.view(), DType::kBF16);
  const std::vector<int64_t> rows = sampled(hidden.shape()[0]);
  const Tensor inputs = gather_rows(hidden, rows);
  const LayerOutput few{.out = gather_rows(output.out, rows),
                        .logits = gather_rows(output.logits, rows),
                        .ids = gather_rows(output.ids, rows),
                        .weights = gather_rows(output.weights, rows)};
  const StageCheck check =
      check_against_reference(*owned.context, spec, *owned.source, few.result(inputs.const_view()));
  EXPECT_EQ(check.routing_mismatches, 0);
  EXPECT_LE(check.worst_token_error, accuracy_bar(spec.weight_dtype, DType::kBF16));
}

struct Sizes {
  int64_t tokens, inner, hidden;
};

// Parts that test_moe_layer.py adds to the routed experts: shared experts, their gate, transforms
// of the routed input and output.
enum class Extra : uint8_t { kNone, kShared, kGatedShared, kTransforms, kSharedAndTransforms };

void add_extra(Extra extra, MoeSpec& spec) {
  const bool shared = extra != Extra::kNone && extra != Extra::kTransforms;
  if (shared) {
    spec.shared = {
        .mode = extra == Extra::kGatedShared ? SharedMode::kSigmoidGate : SharedMode::kAdd,
        .intermediate_size = spec.intermediate_size};
  }
  if (extra == Extra::kTransforms || extra == Extra::kSharedAndTransforms) {
    spec.latent.size = spec.hidden_size / 2;
  }
}

using LayerRow = std::tuple<Sizes, int64_t, int64_t, Extra>;
class VllmMatrixMoeLayer : public ::testing::TestWithParam<LayerRow> {};

TEST_P(VllmMatrixMoeLayer, SampledTokens_AreWithinTheBar) {
  const auto& [sizes, experts, top_k, extra] = GetParam();
  MoeSpec spec = make_spec(experts, top_k, sizes.hidden, sizes.inner, DType::kBF16);
  add_extra(extra, spec);
  const OwnedLayer owned = make_layer(spec, {.max_tokens = sizes.tokens});
  expect_sampled_tokens_accurate(owned, random_tensor(DType::kBF16, sizes.tokens, sizes.hidden, 1));
}

std::string layer_row_name(const ::testing::TestParamInfo<LayerRow>& row) {
  const auto& [sizes, experts, top_k, extra] = row.param;
  constexpr const char* kExtras[] = {"routed", "shared", "gated", "transforms", "all"};
  return "m" + std::to_string(sizes.tokens) + "_n" + std::to_string(sizes.inner) + "_k" +
         std::to_string(sizes.hidden) + "_e" + std::to_string(experts) + "_top" +
         std::to_string(top_k) + "_" + kExtras[static_cast<size_t>(extra)];
}

INSTANTIATE_TEST_SUITE_P(
    Rows, VllmMatrixMoeLayer,
    ::testing::Combine(::testing::Values(Sizes{1, 128, 256}, Sizes{32, 512, 512}),
                       ::testing::Values(8, 64), ::testing::Values(2, 6),
                       ::testing::Values(Extra::kNone, Extra::kShared, Extra::kGatedShared,
                                         Extra::kTransforms, Extra::kSharedAndTransforms)),
    layer_row_name);

// The largest size: 64 experts of it take 0.8 GB, so each part runs once.
INSTANTIATE_TEST_SUITE_P(Large, VllmMatrixMoeLayer,
                         ::testing::Combine(::testing::Values(Sizes{222, 1024, 2048}),
                                            ::testing::Values(8), ::testing::Values(2, 6),
                                            ::testing::Values(Extra::kNone,
                                                              Extra::kSharedAndTransforms)),
                         layer_row_name);

using FusedRow = std::tuple<Sizes, int64_t, int64_t, bool>;
class VllmMatrixFusedMoe : public ::testing::TestWithParam<FusedRow> {};

TEST_P(VllmMatrixFusedMoe, SampledTokens_AreWithinTheBar) {
  const auto& [sizes, experts, top_k, chunked] = GetParam();
  MoeSpec spec = make_spec(experts, top_k, sizes.hidden, sizes.inner, DType::kBF16);
  spec.router.renormalize = Renormalize::kNone;
  const OwnedLayer owned = make_layer(spec, {.max_tokens = chunked ? int64_t{8} : int64_t{64}});
  expect_sampled_tokens_accurate(owned, random_tensor(DType::kBF16, sizes.tokens, sizes.hidden, 2));
}

std::string fused_row_name(const ::testing::TestParamInfo<FusedRow>& row) {
  const auto& [sizes, experts, top_k, chunked] = row.param;
  return "m" + std::to_string(sizes.tokens) + "_n" + std::to_string(sizes.inner) + "_k" +
         std::to_string(sizes.hidden) + "_e" + std::to_string(experts) + "_top" +
         std::to_string(top_k) + (chunked ? "_chunked" : "");
}

INSTANTIATE_TEST_SUITE_P(Rows, VllmMatrixFusedMoe,
                         ::testing::Combine(::testing::Values(Sizes{1, 128, 128},
                                                              Sizes{1, 2048, 128},
                                                              Sizes{33, 2048, 128}),
                                            ::testing::Values(8, 64), ::testing::Values(2, 6),
                                            ::testing::Bool()),
                         fused_row_name);

}  // namespace
}  // namespace conclave
