// What conclave plan compares: clusters, strategies, loads and plans.
#include "io/io_test_support.h"
#include "plan/advice.h"
#include "plan/page.h"
#include "plan/planner.h"
#include "plan/rank_loads.h"
#include "plan/report.h"
#include "trace/synthetic_trace.h"

#include "conclave/error.h"
#include "conclave/synthetic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <set>
#include <string>

namespace conclave::tool {
namespace {

using testing::code_of;
using testing::name_of;

TEST(Cluster, Texts_AreRead) {
  const Cluster one = parse_cluster("8:h200");
  EXPECT_EQ(one.nodes, 1);
  EXPECT_EQ(one.gpus_per_node, 8);
  EXPECT_EQ(one.link_gbps, 395);
  const Cluster many = parse_cluster("16x4:h100,network_gbps=25.5,memory_gb=90");
  EXPECT_EQ(many.num_gpus(), 64);
  EXPECT_EQ(many.memory_tbps, 3.35);
  EXPECT_EQ(many.network_gbps, 25.5);
  EXPECT_EQ(many.memory_gb, 90);
  EXPECT_EQ(parse_cluster("4").gpu, "h200");
  EXPECT_EQ(cluster_text(many), "16 nodes of 4 h100");
}

TEST(Cluster, WrongTexts_NameTheKey) {
  const std::pair<const char*, const char*> cases[] = {{"", "gpus"},
                                                       {"x", "nodes"},
                                                       {"0:h200", "gpus"},
                                                       {"0x8:h200", "nodes"},
                                                       {"-1:h200", "gpus"},
                                                       {"8:b300", "gpu"},
                                                       {"8:h200,speed=3", "speed"},
                                                       {"8:h200,link_gbps=0", "link_gbps"},
                                                       {"8:h200,link_gbps=nan", "link_gbps"},
                                                       {"8:h200,link_gbps=inf", "link_gbps"},
                                                       {"8:h200,link_gbps=", "link_gbps"},
                                                       {"8:h200,link_gbps=4x", "link_gbps"},
                                                       {"8:h200,", "key"},
                                                       {"8:custom", "memory_gb"},
                                                       {"65536x8:h200", "nodes x gpus"},
                                                       {"99999999999x8:h200", "nodes"},
                                                       {"8x8x8:h200", "gpus"}};
  for (const auto& [text, key] : cases) {
    std::string what;
    EXPECT_EQ(name_of(code_of([&] { parse_cluster(text); }, &what)), "kInvalidArgument") << text;
    EXPECT_NE(what.find(key), std::string::npos) << text << ": " << what;
  }
}

TEST(Cluster, Files_AreRead) {
  const testing::TemporaryDirectory directory;
  const auto cluster_of = [&](const std::string& json) {
    return parse_cluster(directory.write("cluster.json", json).string());
  };
  const Cluster cluster = cluster_of(
      R"({"nodes": 2, "gpus": 4, "gpu": "custom", "memory_gb": 64, "memory_tbps": 2,
          "tensor16_tflops": 400, "tensor8_tflops": 800, "float32_tflops": 20, "link_gbps": 100,
          "link_us": 12, "network_gbps": 12.5, "network_us": 15, "network_peer_us": 1})");
  EXPECT_EQ(cluster.num_gpus(), 8);
  EXPECT_EQ(cluster.network_gbps, 12.5);
  // What it prints can be read again.
  EXPECT_EQ(cluster_json(cluster_of(cluster_json(cluster).dump())), cluster_json(cluster));
  const std::pair<const char*, const char*> wrong[] = {
      {"", "kJsonSyntax"},
      {"{", "kJsonSyntax"},
      {"[]", "kJsonType"},
      {R"({"gpus": "8"})", "kJsonType"},
      {R"({"gpus": 1.5})", "kJsonType"},
      {R"({"gpu": 1})", "kJsonType"},
      {R"({"gpu": "h200", "link_us": "fast"})", "kJsonType"},
      {R"({"gpu": "h200", "gpus": -1})", "kInvalidArgument"},
      {R"({"gpu": "h200", "gpus": 1e30})", "kJsonType"},
      {R"({"gpu": "h200", "colour": 3})", "kInvalidArgument"},
      {R"({"gpus": 8})", "kInvalidArgument"}};
  for (const auto& [json, code] : wrong) {
    EXPECT_EQ(name_of(code_of([&] { cluster_of(json); })), code) << json;
  }
  EXPECT_EQ(name_of(code_of([] { parse_cluster("/none/at/all.json"); })), "kFileNotFound");
  EXPECT_EQ(name_of(code_of([&] { cluster_of(std::string(2 << 20, ' ')); })), "kJsonTooLarge");
}

MoeSpec spec_of(int64_t experts, int64_t top_k) {
  MoeSpec spec;
  spec.num_experts = experts;
  spec.top_k = top_k;
  spec.hidden_size = 2048;
  spec.intermediate_size = 768;
  return spec;
}

PlannedModel model_of(const MoeSpec& spec, int64_t layers = 2) {
  PlannedModel model{.name = "model", .model_type = "", .layers = {}};
  const LayerBytes bytes = layer_bytes(spec, *make_synthetic_source(spec, 0));
  for (int64_t i = 0; i < layers; ++i) {
    model.layers.push_back({.index = i, .spec = spec, .bytes = bytes});
  }
  return model;
}

SyntheticTrace trace_of(const MoeSpec& spec, const std::string& rule, int64_t tokens = 16384,
                        std::vector<int64_t> layers = {0, 1}) {
  return SyntheticTrace({.num_experts = spec.num_experts,
                         .top_k = spec.top_k,
                         .num_tokens = tokens,
                         .layers = std::move(layers)},
                        {.choice = parse_trace_choice(rule), .text = rule});
}

const StrategyPlan& row_of(const ClusterPlan& plan, const std::string& name, int64_t tokens) {
  const auto row = std::ranges::find_if(plan.rows, [&](const StrategyPlan& candidate) {
    return candidate.strategy.name() == name && candidate.tokens == tokens;
  });
  EXPECT_NE(row, plan.rows.end()) << name;
  return row == plan.rows.end() ? plan.rows.front() : *row;
}

TEST(Strategies, Candidates_AreDistinctAndFillTheCluster) {
  for (const std::string text :
       {"1:h200", "2:h200", "8:h200", "6:h200", "2x8:h200", "3x8:h200", "64x8:h200", "5x1:h200"}) {
    const Cluster cluster = parse_cluster(text);
    const MoeSpec spec = spec_of(128, 8);
    std::set<std::string> names;
    bool fills = false;
    for (const Strategy& strategy : candidate_strategies(cluster, spec)) {
      EXPECT_TRUE(names.insert(strategy.name()).second) << strategy.name();
      EXPECT_EQ(cluster.num_gpus() % strategy.group(), 0) << text << " " << strategy.name();
      const GroupShape shape = group_shape(cluster, strategy);
      EXPECT_EQ(shape.nodes * shape.per_node, strategy.group()) << text << " " << strategy.name();
      fills |= strategy.group() == cluster.num_gpus();
      // Every layer can be placed so.
      if (strategy.group() > 64) continue;
      std::vector<double> load(128);
      std::iota(load.begin(), load.end(), 1.0);
      const ExpertSlots slots = place_experts(strategy, cluster, spec, load);
      EXPECT_EQ(slots.num_ranks(), strategy.ep);
      EXPECT_EQ(static_cast<int64_t>(slots.logical_of.size()), 128 + strategy.redundant_experts);
      EXPECT_EQ(std::set<int32_t>(slots.logical_of.begin(), slots.logical_of.end()).size(), 128U);
    }
    EXPECT_TRUE(fills) << text;
  }
}

TEST(LayerLoad, SlotRows_AddUpToTheirExperts) {
  const ExpertSlots slots{
      .num_experts = 3, .logical_of = {0, 1, 1, 2, 1, 0}, .first_of = {0, 2, 4, 6}};
  const std::vector<double> whole = slot_rows(slots, std::vector<double>{5, 7, 0}, true);
  EXPECT_EQ(whole, (std::vector<double>{3, 3, 2, 0, 2, 2}));
  const std::vector<double> parts = slot_rows(slots, std::vector<double>{5, 7.5, 0}, false);
  EXPECT_EQ(parts, (std::vector<double>{2.5, 2.5, 2.5, 0, 2.5, 2.5}));
}

TEST(LayerLoad, Copies_CountEachRankAndNodeOnce) {
  // Both experts of each token are on rank 3, or one there and one on rank 2.
  const ExpertSlots slots{
      .num_experts = 4, .logical_of = {0, 1, 2, 3}, .first_of = {0, 0, 0, 1, 4}};
  TraceInfo info{.num_experts = 4, .top_k = 2, .num_tokens = 8};
  const std::vector<int32_t> together = {1, 2, 1, 3, 2, 3, 1, 2, 3, 1, 2, 1, 1, 3, 2, 3};
  const LayerLoad load(together, info);
  const LayerLoad::Copies copies = load.copies(slots, {.nodes = 2, .per_node = 2});
  // A token at home on rank 3 sends nothing; all four ranks are homes in turn.
  EXPECT_DOUBLE_EQ(copies.to_ranks, 0.75);
  EXPECT_DOUBLE_EQ(copies.choices_elsewhere, 1.5);
  EXPECT_DOUBLE_EQ(copies.to_nodes, 0.5);
  EXPECT_DOUBLE_EQ(copies.within_node, 0.25);
  const std::vector<int32_t> apart = {0, 2, 0, 3, 0, 3, 0, 2, 3, 0, 2, 0, 0, 3, 0, 3};
  const LayerLoad::Copies both = LayerLoad(apart, info).copies(slots, {.nodes = 2, .per_node = 2});
  EXPECT_DOUBLE_EQ(both.to_ranks, 1.5);
  EXPECT_DOUBLE_EQ(both.to_nodes, 0.5) << "a node gets a row once";
}

TEST(LayerLoad, Batches_AreWindowsOrRepeats) {
  const MoeSpec spec = spec_of(16, 2);
  const SyntheticTrace trace = trace_of(spec, "uniform", 1000);
  const std::vector<int32_t> ids = trace.ids(0);
  LayerLoad load(ids, trace.info());
  const auto sum = [](const std::vector<double>& rows) {
    return std::accumulate(rows.begin(), rows.end(), 0.0);
  };
  EXPECT_EQ(sum(load.first()), 1000);
  EXPECT_EQ(sum(load.all()), 2000);
  EXPECT_EQ(load.batches(50).size(), 10U);
  for (const LoadBatch& batch : load.batches(50)) EXPECT_EQ(sum(batch.rows), 100);
  EXPECT_EQ(load.batches(300).size(), 1U);
  EXPECT_EQ(load.batches(1).size(), 16U);
  ASSERT_EQ(load.batches(1500).size(), 1U);
  EXPECT_NEAR(sum(load.batches(1500).front().rows), 3000, 1e-9);
  EXPECT_FALSE(load.batches(1500).front().whole);
  // Without batches that begin in it the second half is one.
  ASSERT_EQ(load.batches(kBatchesOfTrace).size(), 1U);
  EXPECT_EQ(load.batches(kBatchesOfTrace).front().tokens, 500);
}

TEST(LayerLoad, BatchesOfTheTrace_AreThoseOfItsSecondHalf) {
  const std::vector<int32_t> ids = {0, 0, 0, 0, 1, 1, 2, 3, 3, 3};
  LayerLoad load(ids,
                 {.num_experts = 4, .top_k = 1, .num_tokens = 10, .batch_begin = {0, 3, 6, 7}});
  const std::vector<LoadBatch>& batches = load.batches(kBatchesOfTrace);
  ASSERT_EQ(batches.size(), 2U);
  EXPECT_EQ(batches[0].tokens, 1);
  EXPECT_EQ(batches[0].rows, (std::vector<double>{0, 0, 1, 0}));
  EXPECT_EQ(batches[1].tokens, 3);
  EXPECT_EQ(batches[1].rows, (std::vector<double>{0, 0, 0, 3}));
}

TEST(LayerLoad, ShortTraces_AreTheirOwnBothHalves) {
  const std::vector<int32_t> ids = {0, 1};
  const LayerLoad load(ids, {.num_experts = 2, .top_k = 2, .num_tokens = 1});
  EXPECT_EQ(load.first(), load.second());
}

HotSet hot_set_of(const std::string& rule, int64_t tokens) {
  const MoeSpec spec = spec_of(64, 4);
  const SyntheticTrace trace = trace_of(spec, rule, tokens);
  std::vector<double> lifts;
  for (size_t i = 0; i < 2; ++i) {
    const std::vector<int32_t> ids = trace.ids(i);
    lifts.push_back(hot_lift(LayerLoad(ids, trace.info())));
  }
  return judge_hot_set(lifts, trace.info());
}

TEST(HotSet, EvenLoad_HasNone) {
  for (const int64_t tokens : {300, 2000, 20000}) {
    const HotSet hot = hot_set_of("uniform", tokens);
    EXPECT_EQ(hot.verdict, HotSetVerdict::kNone) << tokens << " tokens, lift " << hot.mean_lift;
    EXPECT_EQ(hot.text.rfind("this model has no hot set", 0), 0U) << hot.text;
  }
  EXPECT_EQ(hot_set_of("zipf:0.05", 20000).verdict, HotSetVerdict::kNone);
}

TEST(HotSet, SkewedLoad_HasOne) {
  EXPECT_EQ(hot_set_of("hot:8:0.17", 20000).verdict, HotSetVerdict::kMild);
  const HotSet hot = hot_set_of("hot:8:0.5", 20000);
  EXPECT_EQ(hot.verdict, HotSetVerdict::kHot);
  EXPECT_NEAR(hot.mean_lift, 4, 0.1);
  EXPECT_EQ(hot.hot_layers, 2);
  EXPECT_EQ(hot_set_of("zipf:1", 20000).verdict, HotSetVerdict::kHot);
}

TEST(HotSet, FewTokens_SayNothing) {
  EXPECT_EQ(hot_set_of("uniform", 40).verdict, HotSetVerdict::kUnknown);
  EXPECT_EQ(hot_set_of("hot:8:0.9", 40).verdict, HotSetVerdict::kUnknown);
}

TEST(Planner, SkewedLoad_IsBalancedAndFaster) {
  const MoeSpec spec = spec_of(128, 8);
  const ClusterPlan plan = plan_cluster(model_of(spec), trace_of(spec, "zipf:1"),
                                        {.cluster = parse_cluster("8:h200"), .tokens = {4096}});
  const StrategyPlan& linear = row_of(plan, "EP 8 linear", 4096);
  const StrategyPlan& balanced = row_of(plan, "EP 8 global +8", 4096);
  EXPECT_GT(balanced.balance.mean, linear.balance.mean + 0.2);
  EXPECT_GT(balanced.balance.mean, 0.9);
  EXPECT_LT(balanced.layer_us.mean, 0.8 * linear.layer_us.mean);
  EXPECT_GT(balanced.weight_bytes, linear.weight_bytes);
  EXPECT_EQ(plan.before.strategy, "EP 8 linear");
  ASSERT_EQ(plan.after.of_layer.size(), 2U);
  EXPECT_LT(std::ranges::max(plan.after.of_layer[0]), std::ranges::max(plan.before.of_layer[0]));
  const std::vector<std::string> words = advice(model_of(spec), plan);
  EXPECT_TRUE(std::ranges::any_of(words, [](const std::string& line) {
    return line.rfind("balancing pays", 0) == 0;
  })) << words.back();
}

TEST(Planner, EvenLoad_SaysThatBalancingDoesNotPay) {
  const MoeSpec spec = spec_of(128, 8);
  const PlannedModel model = model_of(spec);
  const ClusterPlan plan = plan_cluster(model, trace_of(spec, "uniform", 65536),
                                        {.cluster = parse_cluster("8:h200"), .tokens = {4096}});
  const std::vector<std::string> words = advice(model, plan);
  EXPECT_NE(words.front().find("no hot set"), std::string::npos);
  EXPECT_EQ(words.back().rfind("balancing does not pay", 0), 0U) << words.back();
}

TEST(Planner, Bytes_AreThoseOfTheRows) {
  // Each token chooses every expert, so that a row goes to every other rank.
  const MoeSpec spec = spec_of(8, 8);
  const ClusterPlan plan =
      plan_cluster(model_of(spec), trace_of(spec, "uniform", 1024),
                   {.cluster = parse_cluster("2x4:h200"), .tokens = {16}, .dispatch_bits = 8});
  const StrategyPlan& row = row_of(plan, "EP 8 linear", 16);
  const double rows = 16 * 2048;
  // One copy over the network, and 3 + 4 x 3/4 within nodes.
  EXPECT_NEAR(row.dispatch_bytes, rows * 7, 1e-3 * rows);
  EXPECT_NEAR(row.combine_bytes, 4 * rows * 7, 1e-3 * rows);
  EXPECT_NEAR(row.network_bytes, 5 * rows, 1e-3 * rows);
  EXPECT_DOUBLE_EQ(row.balance.mean, 1);
  EXPECT_EQ(row_of(plan, "TP 4", 16).network_bytes, 0);
}

TEST(Planner, UnreducedRows_AreMore) {
  const MoeSpec spec = spec_of(64, 8);
  PlanRequest request{.cluster = parse_cluster("4:h200"), .tokens = {256}};
  const SyntheticTrace trace = trace_of(spec, "uniform", 4096);
  const double reduced =
      row_of(plan_cluster(model_of(spec), trace, request), "EP 4 linear", 256).combine_bytes;
  request.combine = EpCombine::kUnreduced;
  const double unreduced =
      row_of(plan_cluster(model_of(spec), trace, request), "EP 4 linear", 256).combine_bytes;
  // Six of eight choices are elsewhere, on 2.7 of three other ranks.
  EXPECT_NEAR(unreduced, 256 * 2048 * 4 * 6.0, 0.03 * unreduced);
  EXPECT_GT(unreduced, 2 * reduced);
}

TEST(Planner, Memory_IsThatOfSlotsSlicesAndWhole) {
  const MoeSpec spec = spec_of(128, 8);
  PlannedModel model = model_of(spec, 10);
  const double expert = 3.0 * 2048 * 768 * 2;
  const double router = 128.0 * 2048 * 2;
  EXPECT_NEAR(model.layers[0].bytes.expert, expert, 1);
  EXPECT_NEAR(rank_weight_bytes(model, 0, 8, 1), 10 * (16 * expert + router), 10);
  EXPECT_NEAR(rank_weight_bytes(model, 8, 8, 1), 10 * (17 * expert + router), 10);
  EXPECT_NEAR(rank_weight_bytes(model, 0, 4, 2), 10 * (16 * expert + router), 10);
  EXPECT_NEAR(rank_weight_bytes(model, 0, 1, 8), 10 * (16 * expert + router), 10);
  model.other_bytes = 5e9;
  const ClusterPlan plan = plan_cluster(
      model, trace_of(spec, "uniform", 2048),
      {.cluster = parse_cluster("8:h200,memory_gb=7"), .tokens = {64}, .reserve_bytes = 1e9});
  const StrategyPlan& linear = row_of(plan, "EP 8 linear", 64);
  EXPECT_GT(linear.memory_bytes, 6e9 + linear.weight_bytes);
  EXPECT_FALSE(linear.fits());
  EXPECT_NE(linear.does_not_fit.find("7.00 GB"), std::string::npos) << linear.does_not_fit;
  EXPECT_EQ(plan.best_latency, -1);
  const std::vector<std::string> words = advice(model, plan);
  EXPECT_EQ(words.back().rfind("nothing fits", 0), 0U) << words.back();
  // The page and the file say so too.
  EXPECT_NE(plan_page(model, plan).find("nothing fits"), std::string::npos);
  EXPECT_TRUE(plan_json(model, plan)["best_latency"].is_null());
}

TEST(Planner, EqualRequests_GiveEqualPlans) {
  const MoeSpec spec = spec_of(32, 4);
  const PlanRequest request{.cluster = parse_cluster("2x4:h200"), .tokens = {1, 64}};
  const PlannedModel model = model_of(spec);
  const SyntheticTrace trace = trace_of(spec, "zipf:0.8", 2000);
  EXPECT_EQ(plan_json(model, plan_cluster(model, trace, request)),
            plan_json(model, plan_cluster(model, trace, request)));
}

TEST(Planner, TracesOfOtherModels_AreRefused) {
  const MoeSpec spec = spec_of(32, 4);
  const PlanRequest request{.cluster = parse_cluster("4:h200"), .tokens = {1}};
  const auto planned = [&](const SyntheticTrace& trace) {
    return name_of(code_of([&] { plan_cluster(model_of(spec), trace, request); }));
  };
  EXPECT_EQ(planned(trace_of(spec_of(16, 4), "uniform", 10)), "kInvalidArgument");
  EXPECT_EQ(planned(trace_of(spec_of(32, 2), "uniform", 10)), "kInvalidArgument");
  EXPECT_EQ(planned(trace_of(spec, "uniform", 0)), "kInvalidArgument");
  EXPECT_EQ(planned(trace_of(spec_of(4097, 4), "uniform", 10)), "kUnsupported");
  EXPECT_EQ(planned(trace_of(spec, "uniform", 10, {0, 2})), "kLayerNotFound");
}

TEST(Planner, OneTokenAndOneChoice_ArePlanned) {
  for (const char* cluster : {"1:h200", "3:h200", "2x2:h200"}) {
    const MoeSpec spec = spec_of(4, 1);
    const ClusterPlan plan = plan_cluster(model_of(spec), trace_of(spec, "one", 1),
                                          {.cluster = parse_cluster(cluster), .tokens = {1}});
    for (const StrategyPlan& row : plan.rows) {
      EXPECT_GT(row.layer_us.mean, 0) << row.strategy.name();
      EXPECT_GT(row.balance.mean, 0) << row.strategy.name();
      EXPECT_LE(row.balance.mean, 1) << row.strategy.name();
    }
    EXPECT_EQ(plan.hot_set.verdict, HotSetVerdict::kUnknown);
  }
}

// Padding and zero experts ask for no rows; a layer without any rows is planned as well.
class EmptyTrace final : public RoutingTrace {
 public:
  explicit EmptyTrace(int64_t tokens)
      : RoutingTrace({.num_experts = 8,
                      .top_k = 2,
                      .num_tokens = tokens,
                      .layers = {0},
                      .batch_begin = {0}}) {}
  std::vector<int32_t> ids(size_t) const override {
    return std::vector<int32_t>(static_cast<size_t>(info().num_tokens * 2), -1);
  }
  std::string describe() const override { return "nothing"; }
};

TEST(Planner, LayersWithoutRows_ArePlanned) {
  const MoeSpec spec = spec_of(8, 2);
  const ClusterPlan plan = plan_cluster(model_of(spec), EmptyTrace(100),
                                        {.cluster = parse_cluster("4:h200"), .tokens = {8}});
  for (const StrategyPlan& row : plan.rows) {
    EXPECT_EQ(row.balance.mean, 1);
    EXPECT_TRUE(std::isfinite(row.layer_us.mean));
  }
}

TEST(Planner, ThousandsOfGpus_TakeSeconds) {
  MoeSpec spec = spec_of(256, 8);
  spec.hidden_size = 7168;
  spec.intermediate_size = 2048;
  const auto begin = std::chrono::steady_clock::now();
  const ClusterPlan plan =
      plan_cluster(model_of(spec, 58), trace_of(spec, "zipf:0.6", 16384),
                   {.cluster = parse_cluster("512x8:h200"), .tokens = {128, 4096}});
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(seconds.count(), testing::kIsInstrumented ? 600 : 20);
  EXPECT_TRUE(std::ranges::any_of(plan.rows,
                                  [](const StrategyPlan& row) { return row.strategy.ep == 4096; }));
  EXPECT_GE(plan.best_throughput, 0);
  // Its heat maps stay small: neighbouring ranks share fields.
  EXPECT_LE(plan.before.of_layer.front().size(), 128U);
  EXPECT_LT(plan_page(model_of(spec, 58), plan).size(), size_t{1} << 20);
}

}  // namespace
}  // namespace conclave::tool
