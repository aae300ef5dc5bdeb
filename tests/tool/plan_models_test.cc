// The models of conclave plan against what H200s measured.
#include "input/shape_options.h"
#include "measured_figures.h"
#include "plan/compute_model.h"
#include "plan/exchange_model.h"
#include "plan/planner.h"
#include "trace/synthetic_trace.h"

#include "conclave/synthetic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

namespace conclave::tool {
namespace {

double relative_error(double predicted, double measured) {
  return std::abs(predicted / measured - 1);
}

TEST(ExchangeModel, MeasuredCollectives_AreWithinTheStatedError) {
  const Cluster cluster = parse_cluster("8:h200");
  double worst = 0;
  const auto compare = [&](Collective kind, int32_t ranks, double bytes, double measured) {
    if (measured == 0) return;
    const double predicted =
        node_microseconds(cluster, kind, ranks, wire_bytes(kind, ranks, bytes));
    worst = std::max(worst, relative_error(predicted, measured));
    EXPECT_LE(relative_error(predicted, measured), kWorstExchangeError)
        << "collective " << static_cast<int>(kind) << " of " << ranks << " ranks, " << bytes
        << " bytes: predicted " << predicted << ", measured " << measured;
  };
  for (const testing::MeasuredCollectives& row : testing::kMeasuredCollectives) {
    const auto bytes = static_cast<double>(row.bytes);
    compare(Collective::kAllToAll, row.ranks, bytes, row.all_to_all);
    compare(Collective::kAllGather, row.ranks, bytes, row.all_gather);
    compare(Collective::kReduceScatter, row.ranks, bytes, row.reduce_scatter);
    compare(Collective::kAllReduce, row.ranks, bytes, row.all_reduce);
  }
  for (const testing::MeasuredRows& row : testing::kMeasuredRows) {
    const double bytes = static_cast<double>(row.tokens * row.hidden);
    compare(Collective::kAllGather, row.ranks, bytes, row.all_gather);
    compare(Collective::kReduceScatter, row.ranks, 2 * bytes * row.ranks, row.reduce_scatter);
  }
  // The statement is not kinder to the model than the figures are.
  EXPECT_GT(worst, 0.9 * kWorstExchangeError);
}

TEST(ExchangeModel, MoreBytesPeersAndNodes_TakeLonger) {
  const Cluster cluster = parse_cluster("4x8:h200");
  double before = 0;
  for (double bytes = 1; bytes < 1e10; bytes *= 3) {
    const double now = node_microseconds(cluster, Collective::kAllToAll, 8, bytes);
    EXPECT_GT(now, before);
    EXPECT_GT(now, node_microseconds(cluster, Collective::kAllToAll, 4, bytes * 0.8));
    before = now;
  }
  EXPECT_EQ(node_microseconds(cluster, Collective::kAllReduce, 1, 0), 0);
  EXPECT_EQ(network_microseconds(cluster, 0, 1e9), 0);
  EXPECT_NEAR(network_microseconds(cluster, 1, 45e6) - network_microseconds(cluster, 1, 0), 1000,
              1e-6);
  const double one_node = all_reduce_microseconds(cluster, {.nodes = 1, .per_node = 8}, 1e6);
  EXPECT_GT(all_reduce_microseconds(cluster, {.nodes = 4, .per_node = 8}, 1e6), one_node + 20);
}

TEST(ExchangeModel, FasterLinks_AreFasterInProportion) {
  const Cluster slow = parse_cluster("8:h200");
  const Cluster fast = parse_cluster("8:h200,link_gbps=790,link_us=4.75");
  for (const double bytes : {1e3, 1e6, 1e9}) {
    EXPECT_NEAR(node_microseconds(fast, Collective::kAllToAll, 8, bytes),
                node_microseconds(slow, Collective::kAllToAll, 8, bytes) / 2, 1e-6 * bytes);
  }
}

PlannedModel model_of(const char* name, const char* form, const testing::MeasuredSizes& sizes) {
  MoeSpec spec;
  spec.num_experts = sizes.experts;
  spec.top_k = sizes.top_k;
  spec.hidden_size = sizes.hidden;
  spec.intermediate_size = sizes.intermediate;
  spec.has_gate = false;  // the measured calls were given ids and weights
  set_weight_type(form, spec);
  const LayerBytes bytes = layer_bytes(spec, *make_synthetic_source(spec, 0));
  return {.name = name, .model_type = "", .layers = {{.index = 0, .spec = spec, .bytes = bytes}}};
}

PlannedModel model_of(const testing::MeasuredLayer& layer) {
  return model_of(layer.model, layer.form, layer.sizes);
}

// The whole way from drawn choices to microseconds.
StrategyPlan predicted(const PlannedModel& model, const char* cluster, const std::string& strategy,
                       int64_t tokens, const std::string& rule) {
  const SyntheticTrace trace({.num_experts = model.spec().num_experts,
                              .top_k = model.spec().top_k,
                              .num_tokens = std::clamp<int64_t>(16 * tokens, 2 * tokens, 32768),
                              .layers = {0}},
                             {.choice = parse_trace_choice(rule), .text = rule});
  const int32_t bits = product_kind(model.spec()) == ProductKind::kBytes ? 8 : 16;
  const ClusterPlan plan = plan_cluster(
      model, trace, {.cluster = parse_cluster(cluster), .tokens = {tokens}, .dispatch_bits = bits});
  const auto row = std::ranges::find_if(
      plan.rows, [&](const StrategyPlan& it) { return it.strategy.name() == strategy; });
  EXPECT_NE(row, plan.rows.end()) << strategy;
  return row == plan.rows.end() ? StrategyPlan{} : *row;
}

double predicted_us(const PlannedModel& model, int64_t tokens,
                    const std::string& rule = "uniform") {
  const StrategyPlan row = predicted(model, "1:h200", "1 GPU", tokens, rule);
  EXPECT_EQ(row.exchange_us, 0);
  return row.layer_us.mean;
}

TEST(ComputeModel, MeasuredLayers_AreWithinTheStatedErrors) {
  struct Errors {
    double worst = 0;
    double sum = 0;
    int count = 0;
  };
  std::map<ProductKind, Errors> errors;
  for (const testing::MeasuredLayer& layer : testing::measured_layers()) {
    const PlannedModel model = model_of(layer);
    const ProductKind kind = product_kind(model.spec());
    const ProductFacts& facts = product_facts(kind);
    ASSERT_TRUE(facts.measured);
    for (const testing::MeasuredCall& call : layer.calls) {
      const double predicted = predicted_us(model, call.tokens);
      const double error = relative_error(predicted, call.us);
      Errors& sums = errors[kind];
      sums.worst = std::max(sums.worst, error);
      sums.sum += error;
      ++sums.count;
      EXPECT_LE(error, facts.worst_error)
          << layer.record << ": " << layer.model << " " << layer.form << ", " << call.tokens
          << " tokens: predicted " << predicted << ", measured " << call.us;
    }
  }
  ASSERT_EQ(errors.size(), 3U) << "values, bytes and codes";
  for (const auto& [kind, sums] : errors) {
    const ProductFacts& facts = product_facts(kind);
    const double mean = sums.sum / sums.count;
    EXPECT_LE(mean, facts.mean_error) << facts.name;
    EXPECT_GT(mean, 0.6 * facts.mean_error) << facts.name << ": the statement is too modest";
    EXPECT_GT(sums.worst, 0.8 * facts.worst_error) << facts.name;
  }
}

TEST(ComputeModel, LayersThatNothingWasFittedTo_AreClose) {
  constexpr double kWorst = 0.22;
  constexpr double kMean = 0.07;
  double sum = 0;
  double worst = 0;
  int count = 0;
  for (const testing::OtherLayer& other : testing::other_layers()) {
    const PlannedModel model = model_of(other.layer);
    for (const testing::MeasuredCall& call : other.layer.calls) {
      const double predicted = predicted_us(model, call.tokens, other.rule);
      const double error = relative_error(predicted, call.us);
      EXPECT_LE(error, kWorst) << other.layer.model << " " << other.layer.form << ", "
                               << call.tokens << " tokens by " << other.rule << ": predicted "
                               << predicted << ", measured " << call.us;
      sum += error;
      worst = std::max(worst, error);
      ++count;
    }
  }
  EXPECT_LE(sum / count, kMean);
  RecordProperty("mean_error", std::to_string(sum / count));
  RecordProperty("worst_error", std::to_string(worst));
}

TEST(RankModel, LayersOverTwoGpus_AreWithinTheStatedErrors) {
  double sum = 0;
  double worst = 0;
  int count = 0;
  for (const testing::MeasuredRankLayer& layer : testing::measured_rank_layers()) {
    const PlannedModel model = model_of(layer.model, layer.form, layer.sizes);
    for (const testing::MeasuredCall& call : layer.calls) {
      const double us =
          predicted(model, "2:h200", layer.strategy, call.tokens, "uniform").layer_us.mean;
      const double error = relative_error(us, call.us);
      EXPECT_LE(error, kRankFacts.worst_error)
          << layer.strategy << ": " << layer.model << ", " << call.tokens
          << " tokens a GPU: predicted " << us << ", measured " << call.us;
      sum += error;
      worst = std::max(worst, error);
      ++count;
    }
  }
  EXPECT_EQ(count, kRankFacts.calls);
  EXPECT_LE(sum / count, kRankFacts.mean_error);
  // The statement is not kinder to the plan than the figures are, nor too modest.
  EXPECT_GT(worst, 0.9 * kRankFacts.worst_error) << worst;
  EXPECT_GT(sum / count, 0.6 * kRankFacts.mean_error);
  RecordProperty("mean_error", std::to_string(sum / count));
}

TEST(ComputeModel, SlowerGpus_TakeLonger) {
  const PlannedModel model = model_of(testing::measured_layers().front());
  const LayerSizes sizes = layer_sizes(model.layers.front(), 1);
  ExpertWork work;
  for (int expert = 0; expert < 16; ++expert) work.add(sizes.expert, 64);
  const ProductKind kind = product_kind(model.spec());
  EXPECT_GT(work.microseconds(parse_cluster("1:h100"), kind),
            work.microseconds(parse_cluster("1:h200"), kind));
  EXPECT_GT(ExpertWork().microseconds(parse_cluster("1:h200"), kind), 0) << "launches take time";
}

TEST(ComputeModel, Slices_HoldTheirPart) {
  const PlannedModel model = model_of(testing::measured_layers().front());
  const ExpertSize whole = layer_sizes(model.layers.front(), 1).expert;
  const ExpertSize half = layer_sizes(model.layers.front(), 2).expert;
  EXPECT_NEAR(half.elements, whole.elements / 2, 1e-6 * whole.elements);
  EXPECT_NEAR(half.bytes, whole.bytes / 2, 1e-6 * whole.bytes);
  EXPECT_GT(half.row_bytes, whole.row_bytes / 2) << "rows are read whole";
}

}  // namespace
}  // namespace conclave::tool
