#include "bench/measure.h"
#include "checks.h"
#include "layer_run.h"

#include <gtest/gtest.h>

namespace conclave::tool {
namespace {

TEST(Timing, Summary_OfKnownSamples) {
  const Timing timing = summarise({4, 1, 3, 2});
  EXPECT_DOUBLE_EQ(timing.mean_ms, 2.5);
  EXPECT_DOUBLE_EQ(timing.median_ms, 2.5);
  EXPECT_DOUBLE_EQ(timing.min_ms, 1);
  EXPECT_DOUBLE_EQ(timing.std_ms * timing.std_ms, 5.0 / 3.0);
}

TEST(Timing, OneSample_HasNoSpread) { EXPECT_EQ(summarise({2}).std_ms, 0); }

TEST(LayerWork, Counts_RowsExpertsBalanceFlopsAndBytes) {
  MoeSpec spec;
  spec.num_experts = 4;
  spec.top_k = 2;
  spec.hidden_size = 10;
  spec.intermediate_size = 5;
  spec.weight_dtype = DType::kBF16;
  const std::vector<int64_t> load = {3, 0, 1, 0};
  const LayerWork work = layer_work(spec, 2, load);
  EXPECT_EQ(work.rows, 4);
  EXPECT_EQ(work.experts_hit, 2);
  EXPECT_DOUBLE_EQ(work.balance, 3.0);
  EXPECT_DOUBLE_EQ(work.flops, 6.0 * 4 * 10 * 5);
  EXPECT_DOUBLE_EQ(work.weight_bytes, 2 * 3.0 * 10 * 5 * 2);
}

TEST(LayerWork, SharedExpert_WorksOnEveryToken) {
  MoeSpec spec;
  spec.num_experts = 1;
  spec.top_k = 1;
  spec.hidden_size = 10;
  spec.intermediate_size = 5;
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 7};
  const LayerWork work = layer_work(spec, 3, std::vector<int64_t>{0});
  EXPECT_DOUBLE_EQ(work.flops, 6.0 * 3 * 10 * 7);
  EXPECT_DOUBLE_EQ(work.weight_bytes, 3.0 * 10 * 7 * 2);
  EXPECT_EQ(work.balance, 0);
}

TEST(SampleTokens, Sample_SpreadsFromFirstToLast) {
  EXPECT_EQ(sample_tokens(10, 4), (std::vector<int64_t>{0, 3, 6, 9}));
  EXPECT_EQ(sample_tokens(3, 8), (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(sample_tokens(9, 1), (std::vector<int64_t>{0}));
  EXPECT_TRUE(sample_tokens(0, 8).empty());
}

}  // namespace
}  // namespace conclave::tool
