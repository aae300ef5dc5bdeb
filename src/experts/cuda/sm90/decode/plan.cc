#include "experts/cuda/sm90/decode/plan.h"

#include "core/checked.h"
#include "core/weight_types.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/sm90/code_values.h"
#include "experts/cuda/sm90/decode/decode_row.h"
#include "experts/cuda/sm90/decode/tables.h"
#include "experts/cuda/sm90/hopper_support.h"
#include "experts/cuda/sm90/stream/signed_bytes.h"
#include "experts/cuda/sm90/stream/stream_codes.h"
#include "quant/activation_rows.h"
#include "quant/weight_format.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0::experts {
namespace {

constexpr int64_t kMinStages = 3;
constexpr int64_t kColumnsOfStep = 16;  // a product has
constexpr int64_t kMaxWidth = int64_t{1} << 24;

int32_t narrow(int64_t value) { return static_cast<int32_t>(value); }

// Scales of rows and of weight rows multiply whole sums of whole numbers, of a byte each.
bool makes_whole_codes(const ExpertsProblem& problem) {
  const QuantSpec& quant = problem.quant;
  return bit_size(problem.weight_dtype) == 8 && quant.weights == WeightScale::kChannel &&
         quant.activations == ActivationScale::kToken &&
         quant::activation_rule(problem.weight_dtype, quant).is_exact();
}

// Rows become codes like those of the weights, which are multiplied as they are: of formats whose
// usual rows these are.
bool makes_codes(const ExpertsProblem& problem) {
  const DType weights = problem.weight_dtype;
  if (problem.quant.activations == ActivationScale::kNone || bit_size(weights) != 8) return false;
  const quant::ActivationRule rule = quant::activation_rule(weights, problem.quant);
  if (rule.codes->element != weights) return false;
  if (quant::format_of(weights).row_codes->element != weights) return false;
  return !rule.is_exact() || makes_whole_codes(problem);
}
bool is_coded(const ExpertsProblem& problem) {
  return !is_plain(problem.weight_dtype) && !makes_codes(problem);
}

// Codes that the streamed kernel decodes too, beside rows as they are.
Support supports_coded(const ExpertsProblem& problem) {
  if (Support support = stream_codes_supports(problem); !support) return support;
  if (problem.quant.activations != ActivationScale::kNone) {
    return Support::no("takes codes of such weights beside rows as they are");
  }
  if (problem.quant.has_column_order) return Support::no("columns have an order");
  if (problem.quant.has_column_factors) return Support::no("columns have factors");
  return Support::yes();
}

// Cuts output columns into blocks and passes, and intermediate rows into slices so short that one
// slice for each of kDecodeMaxTokens fits into a quarter of shared memory.
void plan_down(const ExpertsProblem& problem, DecodePlan& plan) {
  const int64_t rows = ceil_div(problem.hidden_size, plan.blocks);
  plan.passes = narrow(ceil_div(rows, kDecodeMaxPassRows));
  // Whole swizzle groups of 8 rows let the boxes of one copy lie side by side.
  plan.pass_rows = narrow(round_up(ceil_div(rows, plan.passes), 8));
  plan.down_box_bytes = plan.pass_rows * kDecodeBoxBytes;
  plan.down_stage_boxes = std::min(kDecodeStageBytes / plan.down_box_bytes, kDecodeWarps);
  const bool whole = problem.intermediate_size % plan.box_columns == 0;
  plan.down_copy_boxes = whole ? plan.down_stage_boxes : 1;
  const int64_t most =
      problem.gpu().shared_bytes_per_block / 4 / kDecodeMaxTokens / plan.row_box_bytes;
  const int64_t slices = ceil_div(plan.down_boxes, std::max<int64_t>(most, 8));
  plan.slice_boxes = narrow(round_up(ceil_div(plan.down_boxes, slices), kDecodeWarps));
  plan.k_slices = narrow(ceil_div(plan.down_boxes, plan.slice_boxes));
}

// A draw queues behind weights under way, so that blocks with few tiles take their own ones alone.
// Tiles of lanes have few stages, so that a ring of them stands between a draw and its tile. Others
// lose by it, and by what L2 brings early: e4m3 and bf16 of Qwen3-30B 3 to 5 %
// (bench/results/h200/2026-11-30-one-launch-ahead.md).
void plan_draws(DecodePlan& plan) {
  plan.tiles_ahead = 2;
  plan.few_tiles = 4 * plan.tiles_ahead;
  if (!plan.has_lanes) return;
  constexpr int64_t kStagesAhead = kDecodeTilesAhead;
  const int64_t stages = ceil_div(plan.up_boxes, kDecodeUpStageBoxes);
  plan.tiles_ahead = std::max(plan.tiles_ahead, narrow(ceil_div(kStagesAhead, stages)));
  plan.few_tiles = 2 * plan.tiles_ahead;
  plan.stages_in_l2 = 8;
}

DecodeFactors factors_of(const DecodePlan& plan, int64_t columns, int64_t stage_boxes) {
  const int64_t own = columns == 0 || columns > plan.box_columns ? plan.box_columns : columns;
  DecodeFactors factors{.groups = narrow(plan.box_columns / own),
                        .steps = narrow(own / kColumnsOfStep),
                        .columns = narrow(columns),
                        .stage_groups = 1};
  if (columns == 0) return factors;
  factors.stage_groups = narrow(ceil_div(stage_boxes * plan.box_columns, columns));
  // A stage may begin within a group.
  if (columns > plan.box_columns) ++factors.stage_groups;
  return factors;
}

void plan_factors(const ExpertsProblem& problem, DecodePlan& plan) {
  plan.up_factors = factors_of(plan, gate_up_factor_columns(problem), kDecodeUpStageBoxes);
  plan.down_factors = factors_of(plan, down_factor_columns(problem), plan.down_stage_boxes);
  const FactorForm form = factor_form(problem);
  if (form == FactorForm::kExact) {
    // A pass begins at a multiple of eight rows, so that its box, from a multiple of 16 on, has
    // room for all of them.
    plan.down_scale_rows = narrow(round_up(plan.pass_rows, 16));
    plan.factor_bytes =
        narrow(round_up(std::max(16 * plan.up_factors.stage_groups,
                                 plan.down_scale_rows * plan.down_factors.stage_groups),
                        128));
    return;
  }
  const int32_t numbers =
      std::max(16 * plan.up_factors.stage_groups, plan.pass_rows * plan.down_factors.stage_groups);
  // TMA writes to multiples of 128 bytes.
  const auto bytes_of = [&](size_t number) {
    return narrow(round_up(int64_t{numbers} * static_cast<int64_t>(number), 128));
  };
  if (has_steps(form)) {
    // A box has the columns of whole units.
    const int64_t units =
        units_of_box(problem) *
        int64_t{std::max(16 * kDecodeUpStageBoxes, plan.pass_rows * plan.down_stage_boxes)};
    // Those of a stage are whole units, and so words.
    plan.second_factor =
        narrow(round_up(step_words(form, numbers) * bytes_of_step_word(form), 128));
    plan.factor_bytes =
        plan.second_factor + narrow(round_up(units * bytes_of_step_unit(form), 128));
  } else {
    plan.second_factor = bytes_of(sizeof(float));
    plan.factor_bytes = plan.second_factor;
  }
  if (form == FactorForm::kZeros) plan.factor_bytes += bytes_of(2);  // bf16
  if (form == FactorForm::kOffsets) plan.factor_bytes += plan.second_factor;
  const CodeOrder order = code_order(problem);
  const bool is_in_order =
      order == CodeOrder::kLanesOfNumbers || order == CodeOrder::kLanesOfSmallNumbers;
  if (is_in_order || takes_whole_bytes(problem)) return;  // no table
  // Entries of bytes, of both terms one after the other, or of both terms of a code as stored.
  int32_t entries = 256;
  if (takes_two_terms(problem.weight_dtype)) entries = order == CodeOrder::kStored ? 16 : 512;
  plan.value_bytes = entries * 32 * narrow(sizeof(uint32_t));
}

// Every block of the single launch quantises the intermediate of all its tokens again: at 4 tokens
// streamed kernels are 3 to 18 % faster (bench/results/h200/LOG.md).
constexpr int64_t kPreferredTokensQuantised = 2;
// A product of codes looks them up for one token as for sixteen, so that streamed kernels, which
// have more of a block's time for that, are faster from 3 tokens on (bench/results/h200/LOG.md).
constexpr int64_t kPreferredTokensOfCodes = 2;
// Beside whole numbers the streamed kernel has two tokens in 32.5 us, one launch in 35.8.
constexpr int64_t kPreferredTokensOfWholes = 1;

int64_t preferred_tokens(const ExpertsProblem& problem) {
  if (makes_whole_codes(problem)) return kPreferredTokensOfWholes;
  if (makes_codes(problem)) return kPreferredTokensQuantised;
  return is_coded(problem) ? kPreferredTokensOfCodes : kDecodeMaxTokens;
}

}  // namespace

bool takes_whole_bytes(const ExpertsProblem& problem) {
  return are_signed_bytes(problem) && !has_offsets(factor_form(problem));
}

int32_t units_of_box(const ExpertsProblem& problem) {
  return narrow(bit_size(problem.weight_dtype) / code_bits(problem));
}

DecodePlan decode_plan(const ExpertsProblem& problem) {
  DecodePlan plan;
  plan.blocks = problem.gpu().multiprocessors;
  plan.hidden_size = narrow(problem.hidden_size);
  plan.intermediate_size = narrow(problem.intermediate_size);
  plan.top_k = narrow(problem.top_k);
  plan.num_local_experts = narrow(problem.num_local_experts);
  plan.weight_bits = narrow(code_bits(problem));
  plan.makes_codes = makes_codes(problem);
  plan.has_lanes = code_order(problem) != CodeOrder::kStored;
  const int64_t box = kDecodeBoxBytes * 8 / plan.weight_bits;
  plan.box_columns = narrow(box);
  plan.row_box_bytes = narrow(plan.makes_codes ? box : box * 2);
  plan.up_boxes = narrow(ceil_div(problem.hidden_size, box));
  plan.down_boxes = narrow(ceil_div(problem.intermediate_size, box));
  plan.tile_features = problem.activation.gated ? 8 : 16;
  plan.feature_tiles = narrow(ceil_div(problem.intermediate_size, plan.tile_features));
  // A copy of several boxes cannot tell that a row ends within its last box.
  plan.up_copy_boxes = problem.hidden_size % box == 0 ? kDecodeUpStageBoxes : 1;
  plan_draws(plan);
  plan_down(problem, plan);
  plan.intermediate_bytes = plan.makes_codes ? 4 : 2;
  plan.intermediate_stride = plan.down_boxes * box;
  plan.intermediate_columns =
      narrow(round_up(problem.intermediate_size, plan.has_lanes ? kWordColumns : int64_t{1}));
  if (is_coded(problem)) plan_factors(problem, plan);
  for (int32_t tokens = 1; tokens <= kDecodeMaxTokens && tokens * problem.top_k <= kDecodeMaxPairs;
       ++tokens) {
    if (decode_shared(plan, tokens, problem.gpu().shared_bytes_per_block).stages == 0) break;
    plan.max_tokens = tokens;
  }
  return plan;
}

DecodeShared decode_shared(const DecodePlan& plan, int64_t tokens, int64_t shared_bytes_per_block) {
  // The extra 64 bytes put rows of neighbouring tokens into different banks.
  const int64_t slice_boxes = std::min(plan.slice_boxes, plan.down_boxes);
  const int64_t up_pitch = int64_t{plan.up_boxes} * plan.row_box_bytes + 64;
  const int64_t down_pitch = slice_boxes * plan.row_box_bytes + 64;
  const int64_t down_rows = tokens * std::min(plan.top_k, plan.num_local_experts) * plan.k_slices;
  // All slices of the intermediate rows are held at once if they take up to a third of shared
  // memory, otherwise they come in rounds.
  const int64_t rows_bytes =
      std::max({tokens * up_pitch, tokens * down_pitch,
                std::min(down_rows * down_pitch, shared_bytes_per_block / 3)});
  const int64_t rows_in = std::min(down_rows, rows_bytes / down_pitch);
  const int64_t scales =
      plan.makes_codes ? 4 * std::max<int64_t>(tokens * plan.up_boxes, rows_in * slice_boxes) : 0;
  constexpr int64_t kTables = sizeof(DecodeTables);
  constexpr int64_t kTilesOfWarps = int64_t{kDecodeTileBuffers} * kDecodeTileBytes;
  static_assert(kTilesOfWarps >= int64_t{kDecodeWarps} * kDecodeMaxTokens * kDecodeMaxPassRows * 4);
  constexpr int64_t kOtherBarriers = 2 * kDecodeTileBuffers + 2;
  constexpr int64_t kStageScaleBytes = kDecodeUpStageBoxes * 2 * 4;
  const int64_t fixed = kTables + kTilesOfWarps + scales + rows_bytes + plan.value_bytes +
                        kOtherBarriers * 8 + 8 * 128;
  constexpr int64_t kMaxStages = kDecodeTileSlots - kDecodeTileBuffers - kDecodeTilesAhead - 4;
  const int64_t stages =
      std::min(kMaxStages, (shared_bytes_per_block - fixed) /
                               (kDecodeStageBytes + 16 + kStageScaleBytes + plan.factor_bytes));
  if (stages < kMinStages) return {};

  DecodeShared shared;
  shared.stages = narrow(stages);
  int64_t end = stages * kDecodeStageBytes;
  const auto take = [&end](int64_t bytes) {
    const int64_t begin = end;
    end += round_up(bytes, 128);
    return static_cast<uint32_t>(begin);
  };
  shared.barriers = take((2 * stages + kOtherBarriers) * 8);
  shared.stage_scales = take(stages * kStageScaleBytes);
  shared.factors = take(stages * plan.factor_bytes);
  shared.values = take(plan.value_bytes);
  shared.tables = take(kTables);
  shared.tiles = take(kTilesOfWarps);
  shared.row_scales = take(scales);
  shared.rows = take(rows_bytes);
  shared.up_pitch = static_cast<uint32_t>(up_pitch);
  shared.down_pitch = static_cast<uint32_t>(down_pitch);
  shared.down_rows = narrow(rows_in);
  shared.total = static_cast<uint32_t>(end);
  return shared;
}

OneLaunchReach decode_reach(const ExpertsProblem& problem) {
  const int64_t most = decode_plan(problem).max_tokens;
  return {.most = most,
          .preferred = std::min(most, preferred_tokens(problem)),
          .measured = kDecodeMaxTokens};
}

size_t decode_bytes(const ExpertsProblem& problem, int64_t /*tokens*/) {
  const DecodePlan plan = decode_plan(problem);
  return static_cast<size_t>(int64_t{plan.max_tokens} * plan.top_k * plan.intermediate_stride *
                             plan.intermediate_bytes);
}

Support decode_supports(const ExpertsProblem& problem) {
  if (Support device = is_hopper(problem.gpu()); !device) return device;
  if (problem.weight_dtype == DType::kF32) return Support::no("weights are float32");
  if (makes_codes(problem)) {
    if (Support support = supports_bytes(problem, problem.weight_dtype); !support) return support;
  }
  if (is_coded(problem)) {
    if (Support support = supports_coded(problem); !support) return support;
  }
  if (problem.num_local_experts < 1) return Support::no("no local experts");
  if (problem.hidden_size > kMaxWidth || problem.intermediate_size > kMaxWidth)
    return Support::no("rows wider than 2^24");
  if (problem.top_k > kDecodeMaxPairs) return Support::no("more than 128 experts per token");
  if (decode_plan(problem).max_tokens == 0)
    return Support::no("a row of the hidden size leaves no shared memory for weights");
  return Support::yes();
}

}  // namespace conclave::inline v0::experts
