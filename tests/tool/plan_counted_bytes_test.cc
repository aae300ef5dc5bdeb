// The bytes that conclave plan predicts for expert parallel ranks, held against those that ranks
// hand to their communicator for the same choices.
#include "plan/planner.h"
#include "support/layer_fixture.h"
#include "support/thread_ranks.h"
#include "trace/synthetic_trace.h"

#include "conclave/comm.h"
#include "conclave/synthetic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <numeric>
#include <string>
#include <vector>

namespace conclave::tool {
namespace {

constexpr int32_t kRanks = 4;
constexpr int64_t kTokensOfRank = 32;
constexpr int64_t kBatch = kRanks * kTokensOfRank;
constexpr int64_t kTokens = 8 * kBatch;
// A plan judges by the second half of its trace.
constexpr int64_t kJudged = kTokens / 2;

// Bytes for other ranks, by the phase that waits for them.
class CountingRank final : public Communicator {
 public:
  explicit CountingRank(Communicator& real) : real_(real) {}
  std::string_view name() const noexcept override { return real_.name(); }
  int32_t rank() const noexcept override { return real_.rank(); }
  int32_t size() const noexcept override { return real_.size(); }
  std::chrono::nanoseconds timeout() const noexcept override { return real_.timeout(); }
  Support supports(CommFeature feature) const override { return real_.supports(feature); }
  void wait(CommHandle handle, std::chrono::nanoseconds deadline, std::string_view phase) override {
    sent_[std::string(phase)] += under_way_[handle.sequence];
    real_.wait(handle, deadline, phase);
  }
  bool test(CommHandle handle, std::string_view phase) override {
    return real_.test(handle, phase);
  }
  void abort(std::string_view reason) noexcept override { real_.abort(reason); }

  // Forgets what the layer's creation sent.
  void clear() { sent_.clear(); }
  double sent(const std::string& phase) const {
    const auto found = sent_.find(phase);
    return found == sent_.end() ? 0 : static_cast<double>(found->second);
  }
  double sent() const {
    return std::accumulate(sent_.begin(), sent_.end(), 0.0, [](double sum, const auto& of_phase) {
      return sum + static_cast<double>(of_phase.second);
    });
  }

 protected:
  CommHandle start(const CommOperation& operation) override {
    int64_t bytes = 0;
    for (int32_t peer = 0; operation.kind == CommKind::kAllToAllV && peer < size(); ++peer) {
      if (peer != rank()) bytes += operation.exchange.send_bytes[static_cast<size_t>(peer)];
    }
    const CommHandle handle = real_.begin(operation);
    under_way_[handle.sequence] = bytes;
    return handle;
  }

 private:
  Communicator& real_;
  std::map<uint64_t, int64_t> under_way_;
  std::map<std::string, int64_t> sent_;
};

struct Sent {
  double rows = 0;
  double results = 0;
  double all = 0;
};

MoeSpec spec_of_case() {
  MoeSpec spec;
  spec.num_experts = 16;
  spec.top_k = 4;
  spec.hidden_size = 512;
  spec.intermediate_size = 32;
  spec.weight_dtype = DType::kBF16;
  return spec;
}

// Means of a rank and a forward over the batches of the judged half, each rank with successive
// tokens of its own.
Sent sent_by_ranks(const MoeSpec& spec, const std::vector<int32_t>& ids, EpCombine combine) {
  std::vector<Sent> of_rank(kRanks);
  const auto outcomes = testing::run_ranks(
      make_local_group({.num_ranks = kRanks, .timeout = std::chrono::seconds(60)}),
      [&](int32_t rank, Communicator& real) {
        CountingRank counting(real);
        const Context context({.num_threads = 1, .communicator = &counting});
        const auto source = make_synthetic_source(spec, 1);
        const MoeLayer layer = MoeLayer::create(
            context, spec, *source, {.max_tokens = kTokensOfRank, .ep_combine = combine},
            {.ep_size = kRanks, .ep_rank = rank});
        counting.clear();
        const Tensor hidden =
            testing::random_tensor(DType::kBF16, kTokensOfRank, spec.hidden_size, 1);
        Tensor chosen(DType::kI32, {kTokensOfRank, spec.top_k});
        Tensor weights(DType::kF32, {kTokensOfRank, spec.top_k});
        std::fill_n(weights.as<float>(), kTokensOfRank * spec.top_k, 0.25F);
        Tensor out(DType::kBF16, {kTokensOfRank, spec.hidden_size});
        for (int64_t begin = kTokens - kJudged; begin < kTokens; begin += kBatch) {
          const int64_t first = (begin + rank * kTokensOfRank) * spec.top_k;
          std::copy_n(ids.begin() + first, kTokensOfRank * spec.top_k, chosen.as<int32_t>());
          layer.forward({.hidden = hidden.view(),
                         .topk_ids = chosen.view(),
                         .topk_weights = weights.view(),
                         .out = out.view()});
        }
        of_rank[static_cast<size_t>(rank)] = {.rows = counting.sent("dispatch.rows"),
                                              .results = counting.sent("combine.rows"),
                                              .all = counting.sent()};
      });
  EXPECT_EQ(testing::first_failure(outcomes), "");
  Sent mean;
  constexpr double kForwards = kRanks * kJudged / kBatch;
  for (const Sent& sent : of_rank) {
    mean.rows += sent.rows / kForwards;
    mean.results += sent.results / kForwards;
    mean.all += sent.all / kForwards;
  }
  return mean;
}

class PlannedBytes : public ::testing::TestWithParam<const char*> {};

TEST_P(PlannedBytes, OfExpertParallelRanks_AreThoseThatTravel) {
  const MoeSpec spec = spec_of_case();
  const SyntheticTrace trace(
      {.num_experts = spec.num_experts, .top_k = spec.top_k, .num_tokens = kTokens, .layers = {0}},
      {.choice = parse_trace_choice(GetParam()), .text = GetParam()});
  const PlannedModel model{
      .name = "model",
      .model_type = "",
      .layers = {
          {.index = 0, .spec = spec, .bytes = layer_bytes(spec, *make_synthetic_source(spec, 0))}}};
  for (const bool reduced : {true, false}) {
    SCOPED_TRACE(reduced);
    const ClusterPlan plan =
        plan_cluster(model, trace,
                     {.cluster = parse_cluster("4:h200"),
                      .tokens = {kTokensOfRank},
                      .combine = reduced ? EpCombine::kReducedPerRank : EpCombine::kUnreduced});
    const auto row = std::ranges::find_if(
        plan.rows, [](const StrategyPlan& it) { return it.strategy.name() == "EP 4 linear"; });
    ASSERT_NE(row, plan.rows.end());
    const Sent sent = sent_by_ranks(spec, trace.ids(0),
                                    reduced ? EpCombine::kReducedPerRank : EpCombine::kUnreduced);
    EXPECT_GT(sent.rows, 0);
    EXPECT_NEAR(row->dispatch_bytes, sent.rows, 0.01 * sent.rows);
    EXPECT_NEAR(row->combine_bytes, sent.results, 0.01 * sent.results);
    // Ids, weights and headers are no part of the plan.
    EXPECT_LT(sent.all - sent.rows - sent.results, 0.05 * sent.all);
  }
}

std::string name_of(const ::testing::TestParamInfo<const char*>& info) {
  const std::string rule = info.param;
  return rule.substr(0, rule.find(':'));
}

INSTANTIATE_TEST_SUITE_P(Rules, PlannedBytes, ::testing::Values("uniform", "zipf:1", "one"),
                         name_of);

}  // namespace
}  // namespace conclave::tool
