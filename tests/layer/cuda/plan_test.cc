// Tests the plan of a layer on an H200, which any machine can make.

#include "layer/cuda/plan.h"

#include "experts/catalog.h"
#include "experts/cuda/tile_choice.h"
#include "layer/cuda/book_workspace.h"
#include "layer/cuda/h200_plan.h"
#include "support/layer_fixture.h"

#include "conclave/format.h"
#include "conclave/gguf.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::h200;
using testing::make_spec;
using testing::plan;

MoeSpec qwen3() { return find_preset("qwen3-30b-a3b")->spec; }

TEST(CudaPlan, Ladder_CoversEveryNumberOfTokensOnce) {
  for (const int64_t max_tokens : {1, 8, 9, 100, 16384}) {
    const Plan summary = plan(qwen3(), {.max_tokens = max_tokens}).summary;
    ASSERT_FALSE(summary.ladder.empty());
    int64_t next = 1;
    for (const PlanRung& rung : summary.ladder) {
      EXPECT_EQ(rung.first_tokens, next);
      EXPECT_GE(rung.last_tokens, rung.first_tokens);
      EXPECT_FALSE(rung.kernel.empty());
      EXPECT_FALSE(rung.reason.empty());
      EXPECT_LE(rung.workspace_bytes, summary.workspace_bytes);
      next = rung.last_tokens + 1;
    }
    EXPECT_EQ(next, max_tokens + 1);
  }
}

TEST(CudaPlan, FewRowsAreStreamed_ManyAreTiled) {
  const auto kernel_at = [](const char* preset, int64_t tokens) {
    const Plan summary = plan(find_preset(preset)->spec, {.max_tokens = 16384}).summary;
    return rung_for(summary.ladder, tokens).kernel;
  };
  for (const char* preset : {"qwen3-30b-a3b", "mixtral-8x7b", "olmoe"}) {
    EXPECT_EQ(kernel_at(preset, 1), "cuda.decode_sm90");
    EXPECT_EQ(kernel_at(preset, 16), "cuda.stream_sm90");
    EXPECT_EQ(kernel_at(preset, 64), "cuda.stream_sm90");
    EXPECT_EQ(kernel_at(preset, 4096), "cuda.tile_sm90");
    EXPECT_EQ(kernel_at(preset, 16384), "cuda.tile_sm90");
  }
}

TEST(CudaPlan, Codes_LeaveTheOneLaunchAfterTwoTokens) {
  MoeSpec spec = qwen3();
  EXPECT_EQ(plan(spec).decode_tokens, 8);
  spec.weight_dtype = DType::kF8E4M3;
  spec.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  EXPECT_EQ(plan(spec).decode_tokens, 2);
  spec.quant.activations = ActivationScale::kNone;
  EXPECT_EQ(plan(spec).decode_tokens, 2);
  spec.weight_dtype = DType::kI4;
  EXPECT_EQ(plan(spec).decode_tokens, 2);
  spec.latent.size = 512;  // rows behind a projection
  EXPECT_EQ(plan(spec).decode_tokens, 0);
}

// A weight may move a value that lies halfway between two codes: bf16 rows have many such values,
// since their steps are fractions of their own values.
TEST(CudaPlan, WeightsOnTheInput_AreAppliedBeforeRowsAreQuantised) {
  for (const WeightForm& form : weight_forms()) {
    MoeSpec spec = qwen3();
    spec.weight_dtype = form.dtype;
    spec.quant = form.quant;
    if (!gpu_rows_support(form.dtype, form.quant)) continue;
    EXPECT_FALSE(plan(spec).weighs_rows) << form.name;
    spec.weight_on = WeightOn::kInput;
    const bool quantises = form.quant.activations != ActivationScale::kNone;
    EXPECT_EQ(plan(spec).weighs_rows, quantises) << form.name;
  }
}

TEST(CudaPlan, GroupsOfRowsWithFloat32Scales_AreRefusedWithTheWayOut) {
  MoeSpec spec = qwen3();
  spec.weight_dtype = DType::kF4;
  spec.quant = {.weights = WeightScale::kBlock,
                .block_rows = 1,
                .block_cols = 32,
                .activations = ActivationScale::kGroup,
                .activation_group = 32};
  try {
    static_cast<void>(plan(spec));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("with_plain_rows"), std::string::npos) << error.what();
  }
  EXPECT_NO_THROW(static_cast<void>(plan(with_plain_rows(spec))));
}

// Codes run on tensor cores in every form that checkpoints have, whatever the number of tokens.
TEST(CudaPlan, PublishedFormsOfCodes_NeverTakeThePlainKernel) {
  std::vector<WeightForm> forms = weight_forms();
  const auto add = [&](const char* name, DType dtype, QuantSpec quant) {
    forms.push_back({.name = name, .dtype = dtype, .quant = quant});
  };
  const auto groups = [](int64_t columns, WeightZero zeros = WeightZero::kNone) {
    return QuantSpec{
        .weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns, .zeros = zeros};
  };
  add("Q4_K", DType::kI4, groups(32, WeightZero::kOffset));
  add("Q6_K", DType::kI8, groups(16));
  add("Q2_K", DType::kI8, groups(16, WeightZero::kOffset));
  add("MLX, 8 bits", DType::kI8, groups(64, WeightZero::kOffset));
  add("GPTQ with zero points", DType::kI4, groups(128, WeightZero::kPoint));
  add("nf4", DType::kNF4, groups(64));
  add("odd groups", DType::kI4, groups(48));
  QuantSpec rows = groups(128);
  rows.activations = ActivationScale::kToken;
  add("int4 x int8", DType::kI4, rows);
  QuantSpec nvfp4 = groups(16);
  nvfp4.activations = ActivationScale::kGroup;
  nvfp4.activation_group = 16;
  nvfp4.activation_dtype = DType::kF4;
  nvfp4.activation_scale_rule = RowScaleRule::kTwoLevel;
  add("nvfp4 x nvfp4", DType::kF4, nvfp4);
  add("int8 x int8, one step", DType::kI8,
      {.weights = WeightScale::kChannel, .activations = ActivationScale::kTensorStatic});
  for (const WeightForm& form : forms) {
    if (form.quant.weights == WeightScale::kNone) continue;
    if (!gpu_rows_support(form.dtype, form.quant)) continue;
    MoeSpec spec = qwen3();
    spec.weight_dtype = form.dtype;
    spec.quant = form.quant;
    const CudaPlan own = plan(spec, {.max_tokens = 4096});
    for (const experts::LadderRung& rung : own.routed.ladder) {
      EXPECT_FALSE(rung.row->is_reference)
          << form.name << " up to " << rung.last_tokens << " tokens";
    }
  }
}

// What is known of matrices, as of GGUF's blocks of 5 and 6 bits, is for panels of a CPU, but for
// codes of 2 bits, which take half of the memory.
TEST(CudaPlan, KnownCodes_ChangeNoKernelAndNoByte) {
  std::vector<WeightForm> forms = gguf_block_forms();
  std::ranges::copy(gguf_mixed_forms(), std::back_inserter(forms));
  bool any_known = false;
  for (const WeightForm& form : forms) {
    MoeSpec spec = qwen3();
    spec.weight_dtype = form.dtype;
    spec.quant = form.quant;
    const Plan own = plan(spec, {.max_tokens = 4096}).summary;
    any_known |= spec.quant.gate_up_codes.dtype == DType::kI6;
    spec.quant.gate_up_codes = spec.quant.down_codes = {};
    const Plan expected = plan(spec, {.max_tokens = 4096}).summary;
    const bool is_small = form.quant.gate_up_codes.dtype == DType::kU2;
    EXPECT_EQ(own.packed_bytes, expected.packed_bytes / (is_small ? 2 : 1)) << form.name;
    ASSERT_EQ(own.ladder.size(), expected.ladder.size()) << form.name;
    for (size_t rung = 0; rung < own.ladder.size(); ++rung) {
      EXPECT_EQ(own.ladder[rung].kernel, expected.ladder[rung].kernel) << form.name;
      EXPECT_EQ(own.ladder[rung].last_tokens, expected.ladder[rung].last_tokens) << form.name;
      if (is_small) continue;  // tiles of its own
      EXPECT_EQ(own.ladder[rung].workspace_bytes, expected.ladder[rung].workspace_bytes)
          << form.name;
    }
  }
  EXPECT_TRUE(any_known);
}

// Kernels of many rows may round no weight beside rows of codes, and round none of these.
TEST(CudaPlan, ManyRowsOfCodesBesideExactWeights_HaveTheTilesOfManyRows) {
  const auto last_kernel = [](ScaleValues scales, DType rows) {
    MoeSpec spec = qwen3();
    spec.weight_dtype = DType::kF4;
    spec.quant = {.weights = WeightScale::kBlock,
                  .block_rows = 1,
                  .block_cols = 32,
                  .activations = ActivationScale::kToken,
                  .activation_dtype = rows,
                  .scale_values = scales};
    return std::string(plan(spec, {.max_tokens = 4096}).routed.ladder.back().row->name);
  };
  EXPECT_EQ(last_kernel(ScaleValues::kPowerOfTwo, DType::kI8), "cuda.tile_codes_sm90");
  EXPECT_EQ(last_kernel(ScaleValues::kFloat, DType::kI8), "cuda.stream_codes_sm90");
  EXPECT_EQ(last_kernel(ScaleValues::kFloat, DType::kF8E4M3), "cuda.stream_codes_sm90");
}

// mxfp4 weights become bytes beside rows of e4m3, but for scales that bytes do not hold.
TEST(CudaPlan, Mxfp4BesideManyRowsOfE4m3_AreBytesWhereTheirScalesLieNear) {
  MoeSpec spec = qwen3();
  spec.weight_dtype = DType::kF4;
  spec.quant = {.weights = WeightScale::kBlock,
                .block_rows = 1,
                .block_cols = 32,
                .activations = ActivationScale::kToken,
                .scale_values = ScaleValues::kPowerOfTwo};
  const LayerOptions options{.max_tokens = 16384};
  const cuda::DeviceInfo device = h200();
  const auto plan_of = [&](int32_t span) {
    return plan_cuda_layer(
        {.spec = spec, .options = options, .parallel = {}, .device = device, .scale_span = span});
  };
  for (const int32_t span : {0, 26}) {
    const std::vector<PlanRung> ladder = plan_of(span).summary.ladder;
    EXPECT_EQ(rung_for(ladder, 64).kernel, "cuda.stream_codes_sm90");
    EXPECT_EQ(rung_for(ladder, 1024).kernel, "cuda.tile_codes_sm90");
    EXPECT_EQ(rung_for(ladder, 4096).kernel, "cuda.tile_fp4_fp8_sm90");
    EXPECT_EQ(rung_for(ladder, 16384).kernel, "cuda.tile_fp4_fp8_sm90");
  }
  const Plan far = plan_of(27).summary;
  EXPECT_EQ(rung_for(far.ladder, 16384).kernel, "cuda.tile_codes_sm90");
  const auto row = std::ranges::find(far.rows, "cuda.tile_fp4_fp8_sm90", &PlanRow::name);
  ASSERT_NE(row, far.rows.end());
  EXPECT_NE(row->reason.find("2^-27"), std::string::npos) << row->reason;
  // Groups of float32 scales have no values of bf16: this kernel takes any number of them.
  spec.quant.activations = ActivationScale::kGroup;
  EXPECT_EQ(rung_for(plan_of(0).summary.ladder, 1).kernel, "cuda.tile_fp4_fp8_sm90");
  EXPECT_EQ(rung_for(plan_of(27).summary.ladder, 16384).kernel, "cuda.reference");
  spec.quant.activations = ActivationScale::kToken;
  spec.intermediate_size = 760;  // no multiple of 32
  EXPECT_EQ(rung_for(plan_of(0).summary.ladder, 16384).kernel, "cuda.tile_codes_sm90");
}

// Kernels of codes would take such rows as values of bf16, at half the rate.
TEST(CudaPlan, E4m3BesideE4m3Rows_KeepsItsOwnKernels) {
  for (const char* name : {"fp8-block", "fp8-channel", "fp8-tensor", "fp8-static"}) {
    for (const bool power_of_two : {false, true}) {
      for (const Determinism determinism :
           {Determinism::kRepeatable, Determinism::kBatchInvariant}) {
        const std::vector<WeightForm> forms = weight_forms();
        const auto form = std::ranges::find(forms, std::string_view(name), &WeightForm::name);
        ASSERT_NE(form, forms.end()) << name;
        MoeSpec spec = qwen3();
        spec.weight_dtype = form->dtype;
        spec.quant = form->quant;
        if (spec.quant.activations == ActivationScale::kNone) continue;
        const bool is_static = spec.quant.activations == ActivationScale::kTensorStatic;
        spec.quant.power_of_two_scales = power_of_two && !is_static;
        const CudaPlan own = plan(spec, {.max_tokens = 16384, .determinism = determinism});
        for (const experts::LadderRung& rung : own.routed.ladder) {
          EXPECT_NE(rung.row->name.find("fp8"), std::string_view::npos)
              << name << " up to " << rung.last_tokens << ": " << rung.row->name;
        }
      }
    }
  }
}

TEST(CudaPlan, OneLaunch_ServesAsFarAsMeasuredEntriesNameIt) {
  MoeSpec spec = qwen3();
  spec.weight_dtype = DType::kF8E4M3;
  spec.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  const auto reach = [&](int64_t tokens, std::string_view kernel) {
    auto table = std::make_shared<TuningTable>();
    for (TuningEntry entry : list_candidates(plan(spec, {.max_tokens = 8}), 8)) {
      entry.tokens = tokens;
      if (entry.kernel == kernel) table->set(entry);
    }
    return plan(spec, {.max_tokens = 8, .tuning = table}).decode_tokens;
  };
  EXPECT_EQ(reach(8, "cuda.decode_sm90"), 8);
  EXPECT_EQ(reach(5, "cuda.decode_sm90"), 5);
  EXPECT_EQ(reach(2, "cuda.stream_fp8_sm90"), 0);
  EXPECT_EQ(reach(64, "cuda.stream_fp8_sm90"), 2);  // measured for other calls
}

// Each that a rung has once, as its kernel calls it.
TEST(CudaPlan, Arithmetic_IsThatOfTheRungs) {
  MoeSpec spec = qwen3();
  EXPECT_EQ(plan(spec).summary.arithmetic, "wgmma");
  spec.weight_dtype = DType::kF32;
  EXPECT_EQ(plan(spec).summary.arithmetic, "f32_fma");
  spec.weight_dtype = DType::kF4;
  spec.quant = {.weights = WeightScale::kBlock,
                .block_rows = 1,
                .block_cols = 32,
                .activations = ActivationScale::kToken,
                .scale_values = ScaleValues::kPowerOfTwo};
  EXPECT_EQ(plan(spec, {.max_tokens = 16384}).summary.arithmetic,
            "wgmma_codes, wgmma_rounded_codes, wgmma_e5m2_e4m3");
}

TEST(CudaPlan, Explain_ShowsDeviceLadderAndVerdicts) {
  const std::string text = explain(plan(qwen3(), {.max_tokens = 16384}).summary);
  for (const char* word : {"cuda:0 NVIDIA H200", "tokens", "canonical.v1", "cuda.reference"}) {
    EXPECT_NE(text.find(word), std::string::npos) << word << "\n" << text;
  }
}

TEST(CudaPlan, Workspace_IsNearWhatIsNeeded) {
  // At least expert rows, intermediate rows and hidden rows of the largest call must be held.
  const MoeSpec spec = qwen3();
  const int64_t tokens = 16384;
  const CudaPlan made = plan(spec, {.max_tokens = tokens});
  const int64_t slots = tokens * spec.top_k;
  const double needed =
      static_cast<double>(slots * (spec.hidden_size + spec.intermediate_size) * 2);
  EXPECT_LE(static_cast<double>(made.summary.workspace_bytes), 1.25 * needed);
  EXPECT_GE(static_cast<double>(made.summary.workspace_bytes), needed);
}

TEST(CudaPlan, BatchInvariant_UsesOneArithmetic) {
  const CudaPlan made =
      plan(qwen3(), {.max_tokens = 16384, .determinism = Determinism::kBatchInvariant});
  EXPECT_EQ(made.decode_tokens, 0);
  EXPECT_EQ(made.summary.determinism, "D1 D2");
  for (const experts::LadderRung& rung : made.routed.ladder) {
    const bool same_row = rung.row == made.routed.ladder.front().row;
    EXPECT_TRUE(same_row || rung.row->arithmetic == made.routed.ladder.front().row->arithmetic);
  }
  // The rows for few and for many tokens share their arithmetic, so D2 costs neither.
  EXPECT_EQ(made.routed.ladder.front().row->name, "cuda.stream_sm90");
  EXPECT_EQ(made.routed.ladder.back().row->name, "cuda.tile_sm90");
}

bool adds(const CudaPlan& made) {
  return std::any_of(made.routed.ladder.begin(), made.routed.ladder.end(),
                     [](const experts::LadderRung& rung) { return rung.adds_rows; });
}

TEST(CudaPlan, RowsAreAddedInAnyOrder_OnlyWhereAskedFor) {
  for (const Determinism determinism : {Determinism::kRepeatable, Determinism::kBatchInvariant}) {
    const CudaPlan made = plan(qwen3(), {.max_tokens = 16384, .determinism = determinism});
    EXPECT_FALSE(adds(made));
    EXPECT_EQ(explain(made.summary).find("any_order"), std::string::npos);
  }
  EXPECT_EQ(LayerOptions().determinism, Determinism::kRepeatable);
  const CudaPlan ordered = plan(qwen3(), {.max_tokens = 16384});
  const CudaPlan made =
      plan(qwen3(), {.max_tokens = 16384, .determinism = Determinism::kUnordered});
  EXPECT_TRUE(adds(made));
  EXPECT_EQ(made.summary.determinism, "none");
  EXPECT_EQ(made.decode_tokens, ordered.decode_tokens);
  EXPECT_NE(explain(made.summary).find("adds rows in any order"), std::string::npos);
  // [T, H] sums replace [T * k, H] rows.
  EXPECT_LT(made.summary.workspace_bytes, ordered.summary.workspace_bytes * 6 / 10);
  for (const experts::LadderRung& rung : made.routed.ladder) {
    EXPECT_EQ(rung.adds_rows, rung.row->name == "cuda.tile_sm90");
  }
  // No tiled kernel serves so few tokens: nothing adds, and the plan keeps its promise.
  const CudaPlan few = plan(qwen3(), {.max_tokens = 64, .determinism = Determinism::kUnordered});
  EXPECT_FALSE(adds(few));
  EXPECT_EQ(few.summary.determinism, "D1");
}

TEST(CudaPlan, SkewedChoices_HaveAnotherKernelBesideStreamedWeights) {
  const MoeSpec spec = find_preset("mixtral-8x7b")->spec;
  const CudaPlan made = plan(spec, {.max_tokens = 16384});
  const experts::LadderRung& streamed = rung_for(made.routed.ladder, 256);
  EXPECT_EQ(streamed.row->name, "cuda.stream_sm90");
  ASSERT_NE(streamed.skewed_row, nullptr);
  EXPECT_EQ(streamed.skewed_row->name, "cuda.tile_sm90");
  EXPECT_EQ(streamed.skewed_row->arithmetic, streamed.row->arithmetic);
  EXPECT_EQ(streamed.skewed_tile.sorted_input, streamed.tile.sorted_input);
  EXPECT_NE(streamed.reason.find("skewed choices: cuda.tile_sm90"), std::string::npos);
  // Each of eight experts has 64 rows, which fit one tile of 96.
  EXPECT_EQ(even_tiles(streamed, made.routed.problem, 256, 0), 8);
  const auto at = [&](int64_t tokens) {
    return streamed.most_even_tiles.at(static_cast<size_t>(tokens - streamed.first_tokens));
  };
  for (int64_t tokens = streamed.first_tokens; tokens <= streamed.last_tokens; ++tokens) {
    ASSERT_EQ(at(tokens), even_tiles(streamed, made.routed.problem, tokens, 0));
  }
  EXPECT_EQ(rung_for(made.routed.ladder, 4096).skewed_row, nullptr);
  EXPECT_EQ(rung_for(made.routed.ladder, 16).skewed_row, nullptr);
  // Two idle launches would be noticeable; a forced kernel is the only one.
  EXPECT_EQ(rung_for(plan(qwen3(), {.max_tokens = 256}).routed.ladder, 256).skewed_row, nullptr);
  const CudaPlan forced = plan(spec, {.max_tokens = 256, .kernel = "cuda.stream_sm90"});
  for (const experts::LadderRung& rung : forced.routed.ladder) EXPECT_EQ(rung.skewed_row, nullptr);
  // The number of choices that even batches leave to a rank is unknown.
  const CudaPlan part =
      plan(spec, {.max_tokens = 16384}, {.ep_size = 2, .reduce = Reduce::kPartial});
  for (const experts::LadderRung& rung : part.routed.ladder) EXPECT_EQ(rung.skewed_row, nullptr);
}

TEST(CudaPlan, TuningTable_ComesFirst) {
  const MoeSpec spec = qwen3();
  const auto key = [&](const std::string& device) {
    return TuningKey{.device = device,
                     .format = "bf16",
                     .num_experts = spec.num_experts,
                     .hidden_size = spec.hidden_size,
                     .intermediate_size = spec.intermediate_size,
                     .top_k = spec.top_k};
  };
  const CudaPlan plain = plan(spec, {.max_tokens = 1024});
  const experts::DeviceKernelRow& reference = experts::device_kernels().rows().back();
  const std::string tile = experts::to_string(reference.tiles(plain.routed.problem).front());

  const auto with_entry = [&](const TuningKey& of, const std::string& kernel,
                              const std::string& of_tile) {
    auto table = std::make_shared<TuningTable>();
    table->set({.key = of, .tokens = 1024, .kernel = kernel, .tile = of_tile});
    return plan(spec, {.max_tokens = 1024, .kernel = "cuda.reference", .tuning = table});
  };
  const CudaPlan tuned = with_entry(key("NVIDIA H200"), "cuda.reference", tile);
  EXPECT_EQ(tuned.summary.ladder.back().reason, "tuning table");
  const CudaPlan other = with_entry(key("NVIDIA H100"), "cuda.reference", tile);
  EXPECT_NE(other.summary.ladder.back().reason, "tuning table");
  EXPECT_EQ(code_of([&] { with_entry(key("NVIDIA H200"), "cuda.reference", "3x3x3B"); }),
            ErrorCode::kInvalidArgument);
}

TEST(CudaPlan, Candidates_CanEachBeTabled) {
  const MoeSpec spec = qwen3();
  for (const int64_t tokens : {1, 64}) {
    const std::vector<TuningEntry> candidates =
        list_candidates(plan(spec, {.max_tokens = tokens}), tokens);
    EXPECT_GE(candidates.size(), 2U);
    for (const TuningEntry& entry : candidates) {
      auto table = std::make_shared<TuningTable>();
      table->set(entry);
      const Plan made = plan(spec, {.max_tokens = tokens, .tuning = table}).summary;
      EXPECT_EQ(made.ladder.back().kernel, entry.kernel);
      EXPECT_EQ(made.ladder.back().tile, entry.tile);
    }
  }
}

// Whoever makes a table may not know what the layer's source says of its scales.
TEST(CudaPlan, TablesOfMxfp4_ServeWhateverIsKnownOfItsScales) {
  MoeSpec loose = qwen3();
  loose.weight_dtype = DType::kF4;
  loose.quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32};
  MoeSpec known = loose;
  known.quant.scale_values = ScaleValues::kPowerOfTwo;
  int other_stages = 0;
  for (const auto& [maker, user] : {std::pair{loose, known}, std::pair{known, loose}}) {
    for (const TuningEntry& entry : list_candidates(plan(maker, {.max_tokens = 64}), 64)) {
      auto table = std::make_shared<TuningTable>();
      table->set(entry);
      const Plan made = plan(user, {.max_tokens = 64, .tuning = table}).summary;
      EXPECT_EQ(made.ladder.back().kernel, entry.kernel);
      EXPECT_EQ(made.ladder.back().reason, "tuning table");
      other_stages += made.ladder.back().tile != entry.tile ? 1 : 0;
    }
  }
  EXPECT_GT(other_stages, 0);
}

TEST(CudaPlan, WhatCudaLacks_IsListedAsRejectedRows) {
  MoeSpec spec = make_spec(8, 2, 64, 32, DType::kBF16);
  spec.router.name = "an_applications_own";
  EXPECT_EQ(code_of([&] { static_cast<void>(plan(spec)); }), ErrorCode::kUnsupported);
  const cuda::DeviceInfo device = h200();
  const LayerOptions options;
  const ParallelSpec split{.ep_size = 2};
  const Plan summary =
      summarise_cuda_plan({.spec = spec, .options = options, .parallel = split, .device = device});
  for (const char* part : {"router", "reduction"}) {
    const bool listed = std::any_of(summary.rows.begin(), summary.rows.end(), [&](const auto& row) {
      return row.table == "part" && row.name == part && !row.chosen;
    });
    EXPECT_TRUE(listed) << part;
  }
}

TEST(CudaPlan, MoreChoicesThanARouterMakes_NeedThemGiven) {
  for (const auto& [experts, top_k] : {std::pair{1025, 33}, {1100, 1100}, {1500, 8}}) {
    MoeSpec spec = make_spec(experts, top_k, 128, 64, DType::kBF16);
    EXPECT_EQ(code_of([&] { static_cast<void>(plan(spec)); }), ErrorCode::kUnsupported);
    spec.has_gate = false;
    const ParallelSpec half{.ep_size = 2, .reduce = Reduce::kPartial};
    const CudaPlan made = plan(spec, {.max_tokens = 64}, half);
    EXPECT_NE(made.router_limit.find("exceeds"), std::string::npos) << made.router_limit;
    EXPECT_EQ(made.decode_tokens, 0);
    EXPECT_FALSE(made.routed.ladder.empty());
    EXPECT_NE(explain(made.summary).find("topk_weights"), std::string::npos);
  }
  for (const int64_t top_k : {32, 33, 64}) {
    MoeSpec few = make_spec(64, top_k, 128, 64, DType::kBF16);
    few.has_gate = false;
    EXPECT_TRUE(plan(few).router_limit.empty());
  }
}

// The cost model's time on a layer that was made for exactly so many tokens.
double microseconds_at(const CudaPlan& made, int64_t tokens) {
  const experts::LadderRung& rung = rung_for(made.routed.ladder, tokens);
  return experts::tile_microseconds(made.routed.problem, *rung.row, rung.tile, tokens);
}

// Therefore a layer that grows runs like one that was planned for exactly the call.
TEST(CudaPlan, LargerPlan_ChoosesAsWellForFewerTokens) {
  MoeSpec wide = make_spec(160, 6, 5120, 1536, DType::kBF16);
  MoeSpec quantised = wide;
  quantised.weight_dtype = DType::kF8E4M3;
  quantised.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  std::vector<MoeSpec> specs = {wide, quantised};
  for (const char* preset : {"qwen3-30b-a3b", "mixtral-8x7b", "olmoe"}) {
    specs.push_back(find_preset(preset)->spec);
  }
  for (const MoeSpec& spec : specs) {
    const CudaPlan large = plan(spec, {.max_tokens = 16384});
    for (int64_t tokens = 1; tokens <= 16384; tokens += 1 + tokens / 19) {
      const CudaPlan exact = plan(spec, {.max_tokens = tokens});
      EXPECT_EQ(exact.decode_tokens, std::min(large.decode_tokens, tokens));
      EXPECT_LE(microseconds_at(large, tokens), 1.05 * microseconds_at(exact, tokens)) << tokens;
    }
    for (const int64_t tokens : {1, 16, 256, 1024, 4096, 5000, 8192, 16384}) {
      const CudaPlan exact = plan(spec, {.max_tokens = tokens});
      const experts::LadderRung& wanted = rung_for(exact.routed.ladder, tokens);
      const experts::LadderRung& found = rung_for(large.routed.ladder, tokens);
      EXPECT_EQ(found.row, wanted.row) << tokens;
      EXPECT_EQ(experts::to_string(found.tile), experts::to_string(wanted.tile)) << tokens;
    }
  }
}

// With 16-bit rows, vLLM holds [T * k, 2N], [T * k, N] and [T * k, H].
TEST(CudaPlan, ScratchOfACall_IsNoMoreThanVllmsBuffers) {
  MoeSpec wide = make_spec(160, 6, 5120, 1536, DType::kBF16);
  MoeSpec quantised = wide;
  quantised.weight_dtype = DType::kF8E4M3;
  quantised.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  for (MoeSpec spec : {wide, quantised, qwen3()}) {
    spec.has_gate = false;
    const CudaPlan made = plan(spec, {.max_tokens = 16384});
    for (const int64_t tokens : {64, 256, 1024, 4096, 5000, 8192, 16384}) {
      const size_t bytes = workspace_bytes(made, tokens);
      const int64_t rows = tokens * spec.top_k;
      const int64_t buffers = rows * (3 * spec.intermediate_size + spec.hidden_size) * 2;
      EXPECT_LE(bytes, static_cast<size_t>(buffers)) << tokens;
    }
  }
}

// The plain kernel keeps intermediate rows as float32, also where weights and rows are codes.
TEST(CudaPlan, WorkspaceOfTheReference_HoldsFloat32Rows) {
  MoeSpec spec = make_spec(8, 2, 256, 2048, DType::kI8);
  spec.quant = {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken};
  const int64_t tokens = 512;
  const CudaPlan made = plan(spec, {.max_tokens = tokens, .kernel = "cuda.reference"});
  EXPECT_TRUE(made.routed.ladder.back().row->is_reference);
  const int64_t slots = tokens * spec.top_k;
  EXPECT_GE(made.summary.workspace_bytes,
            static_cast<size_t>(slots * (spec.intermediate_size * 4 + spec.hidden_size * 2)));
}

// A call for the most tokens has little more than it uses, whatever other rungs need: where kernels
// change over, the streaming one of fewer tokens needs up to a fifth more than the next one in
// tiles.
TEST(CudaPlan, Workspace_HoldsWhatOneRungNeeds) {
  for (const int64_t experts : {8, 16, 32}) {
    for (const int64_t top_k : {1, 2, 4}) {
      for (const DType dtype : {DType::kBF16, DType::kF8E4M3}) {
        MoeSpec spec = make_spec(experts, top_k, 512, 512, dtype);
        if (dtype == DType::kF8E4M3) {
          spec.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
        }
        for (const int64_t tokens : {300, 700, 1000, 1500}) {
          const CudaPlan made = plan(spec, {.max_tokens = tokens});
          const auto bookings = book_every_rung(made, tokens);
          EXPECT_EQ(bookings.back().calls.last, tokens);
          EXPECT_EQ(made.summary.workspace_bytes, workspace_bytes(made, tokens));
          EXPECT_LE(static_cast<double>(made.summary.workspace_bytes),
                    1.2 * static_cast<double>(bookings.back().total_bytes))
              << "E" << experts << " k" << top_k << " T" << tokens;
        }
      }
    }
  }
}

// The memory that a caller books for some tokens serves every call with fewer.
TEST(CudaPlan, WorkspaceForFewerTokens_IsNeverLarger) {
  MoeSpec spec = make_spec(8, 1, 512, 512, DType::kF8E4M3);
  spec.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  const CudaPlan made = plan(spec, {.max_tokens = 1000});
  size_t before = 0;
  for (int64_t tokens = 1; tokens <= 1000; ++tokens) {
    const size_t bytes = workspace_bytes(made, tokens);
    const WorkspaceBooking alone = book_workspace(made, {.first = tokens, .last = tokens});
    EXPECT_GE(bytes, before);
    EXPECT_GE(bytes, alone.total_bytes) << tokens;
    before = bytes;
  }
}

TEST(CudaPlan, WeightOnE4m3Input_TakesARowForEachChoice) {
  MoeSpec spec = make_spec(8, 1, 256, 256, DType::kF8E4M3);
  spec.weight_on = WeightOn::kInput;
  spec.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  EXPECT_TRUE(plan(spec).weighs_rows);
  spec.quant.power_of_two_scales = true;
  EXPECT_TRUE(plan(spec).weighs_rows);
  EXPECT_EQ(plan(spec).decode_tokens, 0);
  spec.quant = {.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic};
  EXPECT_TRUE(plan(spec).weighs_rows);
  EXPECT_EQ(plan(spec).rows_per_token(), 1);
  const size_t one_row = plan(spec).summary.workspace_bytes;
  spec.top_k = 3;
  EXPECT_EQ(plan(spec).rows_per_token(), 3);
  // This includes float32 rows of 256 for each slot.
  EXPECT_GE(plan(spec).summary.workspace_bytes,
            one_row + size_t{2} * 4 * 256 * static_cast<size_t>(plan(spec).options.max_tokens));
  spec.quant = {.weights = WeightScale::kBlock};
  EXPECT_EQ(plan(spec).rows_per_token(), 1) << "products are weighed, in the order of slots";
  EXPECT_EQ(plan(spec).decode_tokens, 0);
}

TEST(CudaPlan, SharedExperts_JoinTheLaunchesWhereTheyFit) {
  const auto with_shared = [](int64_t width) {
    MoeSpec spec = qwen3();
    spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = width};
    return spec;
  };
  const CudaPlan whole = plan(with_shared(768));
  EXPECT_EQ(whole.fused.slots(), 1);
  EXPECT_FALSE(whole.shared);
  EXPECT_EQ(whole.routed.problem.num_local_experts, 129);
  EXPECT_EQ(whole.routed.problem.top_k, 9);
  EXPECT_EQ(whole.summary.num_local_experts, 128);
  EXPECT_GT(whole.decode_tokens, 0);
  EXPECT_EQ(plan(with_shared(4 * 768)).fused.slices, 4);
  const CudaPlan other_width = plan(with_shared(512));
  EXPECT_EQ(other_width.fused.slots(), 0);
  EXPECT_TRUE(other_width.shared);
  EXPECT_EQ(other_width.decode_tokens, 0);
  MoeSpec scaled = with_shared(768);
  scaled.output_scale = 2.5;
  EXPECT_EQ(plan(scaled).fused.slots(), 1);
  EXPECT_EQ(plan(scaled).decode_tokens, 0);
  MoeSpec other_formula = with_shared(768);
  other_formula.shared.activation = {.name = "gelu"};
  EXPECT_TRUE(plan(other_formula).shared);
  // A scale for a whole intermediate row depends on all slices.
  MoeSpec rows = with_shared(2 * 768);
  rows.weight_dtype = DType::kF8E4M3;
  rows.quant = {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken};
  EXPECT_TRUE(plan(rows).shared);
  rows.quant = {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
  EXPECT_EQ(plan(rows).fused.slots(), 2);
}

TEST(CudaPlan, UnknownKernelAndBadTokens_AreRefused) {
  const MoeSpec spec = make_spec(8, 2, 64, 32, DType::kBF16);
  EXPECT_EQ(code_of([&] { static_cast<void>(plan(spec, {.kernel = "cuda.nothing"})); }),
            ErrorCode::kUnknownName);
  EXPECT_EQ(code_of([&] { static_cast<void>(plan(spec, {.max_tokens = 0})); }),
            ErrorCode::kInvalidArgument);
}

TEST(CudaPlan, RankWithoutExperts_HasNoLadder) {
  const CudaPlan made = plan(make_spec(2, 1, 64, 32, DType::kBF16), {},
                             {.ep_size = 3, .ep_rank = 2, .reduce = Reduce::kPartial});
  EXPECT_TRUE(made.routed.ladder.empty());
  EXPECT_EQ(made.decode_tokens, 0);
  EXPECT_GT(made.summary.workspace_bytes, 0U);
}

// Every kernel beside the experts' own is in a table, with each alternative and a reason.
TEST(CudaPlan, LaunchTables_CoverEveryCallAndExplainAlternatives) {
  MoeSpec spec = qwen3();
  spec.latent.size = 512;
  for (const int64_t max_tokens : {1, 8, 97, 16384}) {
    const CudaPlan made = plan(spec, {.max_tokens = max_tokens});
    EXPECT_EQ(made.gates.router.back().last_tokens, max_tokens);
    EXPECT_EQ(made.gates.latent_down.back().last_tokens, max_tokens);
    EXPECT_EQ(made.gates.latent_up.back().last_tokens, max_tokens);
    EXPECT_EQ(made.routing.back().last_tokens, max_tokens);
    EXPECT_EQ(made.routed.grouping.back().last_tokens, max_tokens);
    for (const auto& [table, rows] : {std::pair{"gate product", 3},
                                      {"latent up", 3},
                                      {"route", 2},
                                      {"group", 5},
                                      {"given ids", 2},
                                      {"dispatcher", 2}}) {
      int listed = 0;
      for (const PlanRow& row : made.summary.rows) {
        if (row.table != table) continue;
        ++listed;
        EXPECT_FALSE(row.reason.empty()) << row.name;
      }
      EXPECT_EQ(listed, rows) << table;
    }
  }
  EXPECT_TRUE(plan(spec).gates.mix.empty());
}

TEST(CudaPlan, GateKernels_ChangeWhereMeasured) {
  const auto kernel = [](int64_t columns, int64_t tokens) {
    const auto ladder = gemm::gate_ladder({.num_logits = columns, .max_tokens = tokens});
    return ladder.back().row->name;
  };
  EXPECT_EQ(kernel(128, 256), "cuda.gate_few");
  EXPECT_EQ(kernel(128, 257), "cuda.gate_some");
  EXPECT_EQ(kernel(128, 7812), "cuda.gate_some");
  EXPECT_EQ(kernel(128, 7813), "cuda.gate_many");
  EXPECT_EQ(kernel(31, 1 << 20), "cuda.gate_some");
  EXPECT_EQ(kernel(40'000, 1), "cuda.gate_some");
  EXPECT_EQ(kernel(2'000'000, 1), "cuda.gate_many");
}

// A ladder for many tokens chooses for a call as the rule for just that call does.
TEST(CudaPlan, Grouping_IsThatOfEachCallAlone) {
  for (const int64_t experts : {1, 33, 128, 1024}) {
    for (const int64_t slots : {1, 3, 8}) {
      const auto ladder = dispatch::group_ladder(
          {.slots_per_token = slots, .num_local_experts = experts, .max_tokens = 70'000});
      for (int64_t tokens = 1; tokens <= 70'000; tokens += 1 + tokens / 31) {
        EXPECT_EQ(rung_for(ladder, tokens).launches,
                  dispatch::group_launches(tokens, slots, experts))
            << tokens << " tokens, " << slots << " slots, " << experts << " experts";
      }
    }
  }
  const auto shape = [](int64_t tokens) { return dispatch::group_launches(tokens, 8, 64).shape; };
  EXPECT_EQ(shape(96).blocks, 1);
  EXPECT_EQ(shape(97).cluster, 8);
  EXPECT_EQ(shape(513).threads, 512);
  EXPECT_EQ(shape(2049).blocks, 32);
  EXPECT_EQ(shape(8193).blocks, 64);
}

TEST(CudaPlan, RoutingWithGrouping_GoesAsFarAsTheDevicesClusters) {
  const MoeSpec spec = qwen3();
  const routing::DeviceRoutePlan route = routing::plan_device_route(spec);
  const auto most = [&](int32_t cluster_blocks) {
    int64_t tokens = 0;
    for (const RouteGroupRung& rung : route_group_ladder({.route = &route,
                                      .num_local_experts = spec.num_experts,
                                      .max_tokens = 1000,
                                      .cluster_blocks = cluster_blocks})) {
      if (rung.shape.blocks > 0) tokens = rung.last_tokens;
    }
    return tokens;
  };
  EXPECT_EQ(most(8), 64);
  EXPECT_EQ(most(16), 256);
  // A kernel that routes and groups has a lane for each slot.
  const routing::DeviceRoutePlan wide =
      routing::plan_device_route(make_spec(64, 33, 128, 64, DType::kBF16));
  const Support fits = route_group_catalog().rows().front().supports(
      {.route = &wide, .num_local_experts = 64, .max_tokens = 9});
  EXPECT_EQ(fits.reason(), "top_k 33 exceeds 32");
  const RouteGroupProblem problem{.route = nullptr, .num_local_experts = 8, .max_tokens = 9};
  EXPECT_FALSE(route_group_catalog().rows().front().supports(problem));
  EXPECT_EQ(route_group_ladder(problem).front().row, &route_group_catalog().rows().back());
}

TEST(CudaPlan, OneLaunch_CannotBeTheOnlyKernel) {
  EXPECT_EQ(code_of([&] { static_cast<void>(plan(qwen3(), {.kernel = "cuda.decode_sm90"})); }),
            ErrorCode::kUnsupported);
}

TEST(TileText, EveryTile_ReadsBack) {
  const CudaPlan made = plan(qwen3());
  for (const experts::DeviceKernelRow& row : experts::device_kernels().rows()) {
    if (!row.supports(made.routed.problem)) continue;
    for (const experts::DeviceTile& tile : row.tiles(made.routed.problem)) {
      EXPECT_EQ(experts::parse_tile(experts::to_string(tile)), tile) << experts::to_string(tile);
    }
  }
  const experts::DeviceTile sorted = {.tokens = 128,
                                      .features = 256,
                                      .depth = 128,
                                      .stages = 4,
                                      .cluster = 2,
                                      .sorted_input = true};
  EXPECT_EQ(experts::to_string(sorted), "128x256x128B, 4 stages, cluster 2, sorted rows");
  EXPECT_EQ(experts::parse_tile(experts::to_string(sorted)), sorted);
  for (const char* text :
       {"", "16", "16x128", "16x128x128", "16x128x128B,", "16x128x128B, 6", "16x128x128B, cluster",
        "ax1x1B", "1x1x1B, 2 blocks", "1x1x1B, sorted"}) {
    EXPECT_EQ(code_of([&] { static_cast<void>(experts::parse_tile(text)); }),
              ErrorCode::kInvalidArgument)
        << text;
  }
}

}  // namespace
}  // namespace conclave
