// Every entry of the tables in share/tuning can be used, and is used.

#include "experts/catalog.h"
#include "layer/cuda/h200_plan.h"
#include "support/layer_fixture.h"

#include "conclave/synthetic.h"
#include "conclave/tuning.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>

namespace conclave {
namespace {

using testing::h200;
using testing::make_spec;
using testing::plan;

std::shared_ptr<const TuningTable> shipped() {
  return std::make_shared<TuningTable>(TuningTable::load("share/tuning/nvidia-h200.txt"));
}

std::string text_of(const TuningEntry& entry) {
  TuningTable table;
  table.set(entry);
  return table.to_text();
}

// A layer with an entry's sizes and format.
MoeSpec spec_of(const TuningKey& key) {
  const bool is_block = key.format == "e4m3.block";
  MoeSpec spec = make_spec(key.num_experts, key.top_k, key.hidden_size, key.intermediate_size,
                           is_block ? DType::kF8E4M3 : DType::kBF16);
  if (is_block) {
    spec.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  }
  return spec;
}

TEST(ShippedTuning, EveryEntry_NamesARowAndOneOfItsTilesForThatProblem) {
  const auto table = shipped();
  ASSERT_FALSE(table->entries().empty());
  for (const TuningEntry& entry : table->entries()) {
    SCOPED_TRACE(text_of(entry));
    EXPECT_EQ(entry.key.device, h200().name);
    EXPECT_GT(entry.microseconds, 0);
    const MoeSpec spec = spec_of(entry.key);
    EXPECT_EQ(tuning_format(spec.weight_dtype, spec.quant), entry.key.format);
    const CudaPlan made = plan(spec, {.max_tokens = entry.tokens});
    const experts::DeviceKernelRow& row = experts::device_kernels().find(entry.kernel, "kernel");
    EXPECT_TRUE(row.supports(made.routed.problem)) << row.supports(made.routed.problem).reason();
    const auto tiles = row.tiles(made.routed.problem);
    const experts::DeviceTile tile = experts::parse_tile(entry.tile);
    EXPECT_NE(std::find(tiles.begin(), tiles.end(), tile), tiles.end());
    EXPECT_EQ(experts::to_string(tile), entry.tile);
  }
}

TEST(ShippedTuning, PlanWithTheTable_UsesEveryEntryAndNoneBeyond) {
  const auto table = shipped();
  for (const TuningEntry& entry : table->entries()) {
    SCOPED_TRACE(text_of(entry));
    const CudaPlan made = plan(spec_of(entry.key), {.max_tokens = 16384, .tuning = table});
    const experts::LadderRung& rung = rung_for(made.routed.ladder, entry.tokens);
    EXPECT_EQ(rung.row->name, entry.kernel);
    EXPECT_EQ(experts::to_string(rung.tile), entry.tile);
    // A rung's reason describes its first token counts, so the choice itself is compared.
    const experts::LadderRung& last = made.routed.ladder.back();
    const CudaPlan plain = plan(spec_of(entry.key), {.max_tokens = 16384});
    EXPECT_EQ(last.row, plain.routed.ladder.back().row);
    EXPECT_EQ(last.tile, plain.routed.ladder.back().tile);
  }
}

TEST(ShippedTuning, PresetsOfThoseSizes_AreServed) {
  const auto table = shipped();
  for (const char* preset : {"mixtral-8x7b", "qwen3-30b-a3b", "olmoe"}) {
    const MoeSpec& spec = find_preset(preset)->spec;
    const Plan summary = plan(spec, {.max_tokens = 16384, .tuning = table}).summary;
    for (const int64_t tokens : {16, 64, 256, 1024}) {
      const std::string& reason = rung_for(summary.ladder, tokens).reason;
      EXPECT_TRUE(reason.starts_with("tuning table")) << preset << " " << tokens << ": " << reason;
    }
    EXPECT_EQ(rung_for(summary.ladder, 1).kernel, "cuda.decode_sm90") << preset;
  }
}

// Some rows have fewer tiles for uncommon activations, which a key does not contain.
TEST(ShippedTuning, UncommonActivations_AreServedToo) {
  const auto table = shipped();
  for (const TuningEntry& entry : table->entries()) {
    SCOPED_TRACE(text_of(entry));
    MoeSpec spec = spec_of(entry.key);
    spec.activation = {.name = "gelu"};
    const CudaPlan made = plan(spec, {.max_tokens = entry.tokens, .tuning = table});
    EXPECT_EQ(experts::to_string(made.routed.ladder.back().tile), entry.tile);
  }
}

TEST(ShippedTuning, OtherDevices_AreServedByTheCostModel) {
  cuda::DeviceInfo other = h200();
  other.name = "NVIDIA H100";
  const MoeSpec& spec = find_preset("qwen3-30b-a3b")->spec;
  const LayerOptions options{.max_tokens = 1024, .tuning = shipped()};
  const CudaPlan made =
      plan_cuda_layer({.spec = spec, .options = options, .parallel = {}, .device = other});
  for (const experts::LadderRung& rung : made.routed.ladder) {
    EXPECT_EQ(rung.reason, "least by the cost model");
  }
}

}  // namespace
}  // namespace conclave
