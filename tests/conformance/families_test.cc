// Compares the library with every golden checkpoint of testdata/models: a family's own files, the
// results of its published code on them, and float64 recomputations.

#include "support/golden_record.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <tuple>
#include <vector>

namespace conclave {
namespace {

using testing::differing_tokens;
using testing::kModels;
using testing::load_record;
using testing::model_directories;
using testing::Record;
using testing::worst_relative;

struct Output {
  Tensor out;
  Tensor logits;
  Tensor ids;
  Tensor weights;
};

Output run(const MoeLayer& layer, const Record& record, ForwardArgs args) {
  const MoeSpec& spec = layer.spec();
  const int64_t tokens = record.hidden.shape()[0];
  Output output{.out = Tensor(record.hidden.dtype(), {tokens, spec.hidden_size}),
                .logits = Tensor(DType::kF32, {tokens, num_logits(spec)}),
                .ids = Tensor(DType::kI32, {tokens, num_slots(spec)}),
                .weights = Tensor(DType::kF32, {tokens, num_slots(spec)})};
  args.hidden = record.hidden.view();
  args.out = output.out.view();
  if (args.topk_ids.empty()) args.captured_logits = output.logits.view();
  args.captured_ids = output.ids.view();
  args.captured_weights = output.weights.view();
  layer.forward(args);
  return output;
}

LayerResult result_of(const Record& record, const Output& output) {
  const ForwardArgs inputs = record.inputs();
  return {.hidden = record.hidden.view(),
          .logits = output.logits.view(),
          .topk_ids = output.ids.view(),
          .topk_weights = output.weights.view(),
          .output = output.out.view(),
          .router_input = inputs.router_input,
          .residual_input = inputs.residual_input,
          .token_ids = inputs.token_ids};
}

class Family : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  static bool is_float_run() { return std::get<1>(GetParam()) == "f32"; }

  // The bar depends on the run: float32 throughout, or rows, weights and products in bf16.
  static double bar() { return is_float_run() ? 5e-6 : 6e-3; }

  // A float32 run stands for a model loaded in float32: nothing is rounded on the way.
  static MoeSpec spec_of_run(MoeSpec spec) {
    if (is_float_run()) spec.router.logits_dtype = spec.router.score_dtype = DType::kF32;
    return spec;
  }
  // Records the worst token of all layers in the test's results.
  void note_worst(double error) {
    worst_error_ = std::max(worst_error_, error);
    RecordProperty("worst_token_error", fmt::format("{:.3g}", worst_error_));
  }
  double worst_error_ = 0;

  static LayerOptions options_of_run() {
    return {.max_tokens = 8, .arithmetic = is_float_run() ? "f32_fma" : ""};
  }
};

TEST_P(Family, EveryLayer_MatchesTheRecords) {
  const auto& [model, run_name] = GetParam();
  const ExpertSet experts = model.ends_with("-vision") ? ExpertSet::kVision : ExpertSet::kText;
  const Checkpoint checkpoint = Checkpoint::open(kModels / model, {.experts = experts});
  const SafetensorsFile golden = SafetensorsFile::open(kModels / model / "golden.safetensors");
  const Context context({.num_threads = 2});
  ASSERT_FALSE(checkpoint.layers().empty());
  for (const CheckpointLayer& entry : checkpoint.layers()) {
    SCOPED_TRACE("layer " + std::to_string(entry.index));
    ASSERT_TRUE(entry.support) << entry.support.reason();
    const Record record = load_record(golden, entry.index, run_name);
    const auto source = checkpoint.layer_source(entry.index);
    const MoeSpec spec = spec_of_run(entry.spec);
    const MoeLayer layer = MoeLayer::create(context, spec, *source, options_of_run());

    if (record.has_logits()) {
      // Tests routing alone, from the logits that the published code saw.
      ForwardArgs from_logits = record.inputs();
      from_logits.router_input = {};
      from_logits.router_logits = record.logits.view();
      const Output routed = run(layer, record, from_logits);
      EXPECT_EQ(differing_tokens(routed.ids, record.ids), 0);
      EXPECT_LE(worst_relative(routed.weights, record.exact_weights), 1e-6);
      const double error = worst(token_errors(routed.out.view(), record.exact_output));
      EXPECT_LE(error, bar());
      note_worst(error);
    }

    // Tests the whole layer through its own gate; the records hold only tokens whose choice is
    // decisive. Its bf16 logits may round to the neighbour of the recorded ones, so it is judged on
    // its own logits.
    if (spec.has_gate) {
      const Output whole = run(layer, record, record.inputs());
      EXPECT_EQ(differing_tokens(whole.ids, record.ids), 0);
      const StageCheck check =
          check_against_reference(context, spec, *source, result_of(record, whole));
      EXPECT_EQ(check.routing_mismatches, 0);
      EXPECT_LE(check.worst_weight_error, 1e-6);
      EXPECT_LE(check.worst_token_error, bar());
      note_worst(check.worst_token_error);
      if (is_float_run()) {
        EXPECT_LE(worst(token_errors(whole.out.view(), record.exact_output)), bar());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, Family,
                         ::testing::Combine(::testing::ValuesIn(model_directories()),
                                            ::testing::Values("f32", "bf16")),
                         [](const auto& row) {
                           std::string name = std::get<0>(row.param) + "_" + std::get<1>(row.param);
                           std::replace_if(
                               name.begin(), name.end(),
                               [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); },
                               '_');
                           return name;
                         });

}  // namespace
}  // namespace conclave
