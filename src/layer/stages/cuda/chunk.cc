#include "layer/stages/cuda/chunk.h"

#include "core/row_stride.h"
#include "dispatch/cuda/combine.h"
#include "dispatch/cuda/group.h"
#include "layer/cuda/book_workspace.h"
#include "layer/cuda/launch_tables.h"
#include "layer/stages/cuda/adapters.h"
#include "layer/stages/cuda/factors.h"
#include "layer/stages/cuda/finish.h"
#include "layer/stages/cuda/gather_ranks.h"
#include "layer/stages/cuda/limits.h"
#include "layer/stages/cuda/mlp.h"
#include "layer/stages/cuda/route.h"
#include "layer/stages/cuda/rows.h"
#include "layer/stages/cuda/sum_ranks.h"
#include "layer/stages/cuda/window_sums.h"
#include "quant/gpu_rows.h"

#include <algorithm>
#include <optional>

namespace conclave::inline v0 {
namespace {

// Decides when rows are cut for the rung's other kernel.
struct SkewRule {
  int32_t tile_tokens = 0;  // 0: never
  int64_t from = 0;
};
SkewRule skew_rule(const CudaChunk& chunk) {
  const experts::LadderRung& rung = rung_for(chunk.plan.routed.ladder, chunk.count);
  if (rung.skewed_row == nullptr) return {};
  return {.tile_tokens = rung_for(chunk.kernels.routed, chunk.count).skewed->tile_tokens(),
          .from = rung.most_even_tiles[static_cast<size_t>(chunk.count - rung.first_tokens)]};
}

// A rank without experts groups nothing, but still counts the load.
dispatch::DeviceGroupArgs group_args(const CudaChunk& chunk, const CudaMarks& marks,
                                     std::span<int64_t> expert_load) {
  const CudaPlan& plan = chunk.plan;
  const int64_t local = plan.routed.problem.num_local_experts;
  const CudaAdapterRung* const adapted =
      rung_of_every_row(chunk.kernels.routed_adapters, marks, chunk.count);
  const SkewRule skew = local == 0 || adapted != nullptr ? SkewRule() : skew_rule(chunk);
  int32_t tile = kLeastGroupTile;
  if (adapted != nullptr) {
    tile = adapted->kernel->tile_tokens();
  } else if (local != 0) {
    tile = rung_for(chunk.kernels.routed, chunk.count).kernel->tile_tokens();
  }
  return {.launches = routed_launches(plan, chunk.count),
          .local_expert = chunk.weights.local_expert.as<int32_t>(),
          .num_experts = plan.num_ids(),
          .num_local_experts = static_cast<int32_t>(std::max<int64_t>(local, 1)),
          .tile_tokens = tile,
          .expert_load = expert_load.data(),
          .num_counted = static_cast<int32_t>(plan.spec.num_experts),
          .workspace = chunk.scratch.at<void>(CudaBuffer::kGroup),
          .skewed_tile_tokens = skew.tile_tokens,
          .skewed_from = skew.from};
}

// Ids that no earlier launch has checked are counted by this one, which also appends the slots of
// shared experts.
void run_in_one_launch(const CudaChunk& chunk, const ForwardArgs& args,
                       const CudaRouting& routing) {
  const MoeSpec& spec = chunk.plan.spec;
  chunk.kernels.decode->run(
      {.hidden = args.hidden.data,
       .hidden_dtype = args.hidden.dtype,
       .hidden_stride = row_stride(args.hidden),
       .num_tokens = chunk.count,
       .live_tokens = routing.live.tokens,
       .shared = routing.is_checked ? SharedSlots() : shared_slots(chunk.plan, routing.factors),
       .topk_ids = routing.topk_ids,
       .topk_weights = routing.topk_weights,
       .local_expert = chunk.weights.local_expert.as<int32_t>(),
       .num_experts = chunk.plan.num_ids(),
       .skipped_ids = routing.is_checked ? nullptr : &chunk.counters->skipped_ids,
       .weight_on_input = spec.weight_on == WeightOn::kInput,
       .output_scale = static_cast<float>(spec.output_scale),
       .counters = chunk.scratch.at<uint32_t>(CudaBuffer::kCounters),
       .workspace = chunk.scratch.at<void>(CudaBuffer::kOneLaunch),
       .out = args.out.data,
       .out_dtype = args.out.dtype,
       .out_stride = row_stride(args.out)},
      chunk.stream);
}

// The rows that routed experts have, or other ranks are to have.
SourceRows routed_source(const CudaChunk& chunk, const ConstTensorView& hidden) {
  const SourceRows rows = source_rows(hidden);
  if (!chunk.runs(CudaStage::kLatentDown)) return rows;
  return project_down(chunk.at(CudaStage::kLatentDown), rows);
}

RoutedRows run_routed(const CudaChunk& chunk, SourceRows rows, const CudaRouting& routing,
                      const CudaMarks& marks, const TensorView& out) {
  using enum CudaStage;
  if (!chunk.runs(kInput)) return no_rows(chunk.at(kExperts));
  const SourceRows tokens = rows;
  if (chunk.runs(kRowsOfSlots)) rows = rows_of_slots(chunk.at(kRowsOfSlots), routing, rows);
  if (marks.any()) {
    return run_adapted_experts(chunk, routing, marks, {.tokens = tokens, .rows = rows});
  }
  const DeviceRows input =
      kernel_rows(chunk.at(kInput), routed_mlp(chunk), routing.groups, routing.live.tokens, rows);
  return run_experts(chunk.at(kExperts), routing, input, out);
}

GroupedRows group_rows(const CudaChunk& chunk, const CudaRouting& routing, const CudaMarks& marks,
                       std::span<int64_t> expert_load) {
  dispatch::DeviceGroupArgs group = group_args(chunk, marks, expert_load);
  group.topk_ids = routing.topk_ids;
  group.num_tokens = chunk.count;
  group.live_tokens = routing.live.tokens;
  group.top_k = chunk.plan.num_slots();
  return dispatch::device_group(group, chunk.stream);
}

// This rank's experts take the rows of all ranks; each rank gets the sums of its own, which may go
// to `out` unless it is empty. `routing` and `marks` are of the latter.
RoutedRows run_over_ranks(const CudaChunk& chunk, const ConstTensorView& hidden,
                          const CudaRouting& routing, const CudaMarks& marks,
                          const TensorView& out) {
  using enum CudaStage;
  GatheredTokens gathered =
      gather_tokens(chunk.at(kGather), routing, routed_source(chunk, hidden), marks);
  CudaChunk all = chunk;
  all.count = chunk.rank_counts.sum();
  gathered.routing.groups = group_rows(all.at(kGather), gathered.routing, gathered.marks, {});
  const RoutedRows rows =
      run_routed(all, gathered.rows, gathered.routing, gathered.marks, TensorView());
  const std::optional<RoutedRows> sums = sum_experts_at_once(
      chunk.at(kBringHome), sum_of_slots(all, gathered.routing, rows), routing.live, out);
  if (sums) return *sums;
  const RoutedRows part = expert_part(all.at(kExpertPart), gathered.routing, rows);
  return bring_home(chunk.at(kBringHome), part);
}

CudaGiven given_to(const CudaChunk& chunk, const ForwardArgs& args, const LiveRows& live) {
  return {.topk_ids = args.topk_ids,
          .topk_weights = args.topk_weights,
          .token_ids = args.token_ids,
          .live = live,
          .limits = limits_of_chunk(chunk.at(CudaStage::kRoute), args)};
}

CudaLogits logits_of(const CudaChunk& chunk, const ForwardArgs& args, const TensorView& captured) {
  if (!args.topk_weights.empty()) return {};
  const ConstTensorView& gate_rows = args.router_input.empty() ? args.hidden : args.router_input;
  return make_logits(chunk.at(CudaStage::kLogits), args.router_logits, gate_rows, captured);
}

LiveRows live_rows(const CudaChunk& chunk, const ForwardArgs& args) {
  return live_rows(chunk.at(CudaStage::kLive), args.num_tokens,
                   static_cast<const bool*>(args.padding_mask.data));
}

// Few tokens, whose experts are all there is: those without an adapter take the single launch and
// so have its bits, the others are computed beside them.
void run_by_marks(const CudaChunk& chunk, const ForwardArgs& args, const CudaRouting& routing,
                  const CudaMarks& marks) {
  using enum CudaStage;
  const CudaChunk own = chunk.at(kSelect);
  const SplitRouting split = split_by_marks(own, routing, marks);
  run_in_one_launch(chunk.at(kOneLaunch), args, split.others);
  TensorView adapted = args.out;
  adapted.data = own.scratch.at<void>(CudaBuffer::kAdapterOut);
  adapted.row_stride = adapted.shape[1];
  const SourceRows tokens = source_rows(args.hidden);
  const RoutedRows rows = run_adapted_experts(
      chunk, split.marked, marks, {.tokens = tokens, .rows = tokens, .only_marked = true});
  const CudaTerms terms{.factors = routing.factors, .hidden = args.hidden};
  finish_sum(chunk, last_sum(chunk.at(kFinish), split.marked, rows, terms),
             {.out = adapted, .shared = {}});
  select_adapted_rows(own, marks, routing.live, adapted, args.out);
}

// Everything but the sum over ranks: `out` takes the layer's output, or this rank's part of it. May
// leave the last sum, which makes `out`, to be made: then returns it.
using LeftSum = std::optional<dispatch::DeviceCombineArgs>;
LeftSum run_own_part(const CudaChunk& chunk, const ForwardArgs& args, const LiveRows& live) {
  using enum CudaStage;
  const CudaGiven given = given_to(chunk, args, live);
  const CudaCaptures captures{.logits = args.captured_logits,
                              .ids = args.captured_ids,
                              .weights = args.captured_weights,
                              .expert_load = args.expert_load};
  const CudaFactors factors =
      chunk.runs(kFactors) ? enqueue_factors(chunk.at(kFactors), args.hidden, given, captures)
                           : CudaFactors();
  const CudaLogits logits = logits_of(chunk, args, args.captured_logits);
  const auto route = [&](const dispatch::DeviceGroupArgs* group) {
    return enqueue_routing(chunk.at(kRoute), {.logits = logits,
                                              .given = given,
                                              .captures = captures,
                                              .factors = factors,
                                              .group = group});
  };
  // A call may add something to the sums of slots that the plan does not know of.
  const bool call_adds = given.live.padding_mask != nullptr || !args.shared_out.empty();
  const CudaMarks marks =
      chunk.runs(kMarks) ? enqueue_marks(chunk.at(kMarks), args, live) : CudaMarks();
  const bool in_one_launch = chunk.runs(kOneLaunch) && !call_adds && args.expert_load.empty();
  if (in_one_launch && !marks.any()) {
    const std::optional<CudaRouting> in_place =
        routing_in_place(chunk.plan.spec, given, captures, factors);
    run_in_one_launch(chunk.at(kOneLaunch), args, in_place ? *in_place : route(nullptr));
    return {};
  }
  if (in_one_launch && marks.by_token != nullptr) {
    run_by_marks(chunk, args, route(nullptr), marks);
    return {};
  }
  const bool gathers = chunk.runs(kGather);
  const dispatch::DeviceGroupArgs group = group_args(chunk.at(kRoute), marks, args.expert_load);
  const CudaRouting routing = route(gathers ? nullptr : &group);
  // Replicas were counted when they were chosen.
  if (gathers && !args.expert_load.empty() && !chunk.plan.part.has_replicas()) {
    static_cast<void>(group_rows(chunk.at(kRoute), routing, CudaMarks(), args.expert_load));
  }
  const bool only_rounds = chunk.plan.end.rounds_sums && chunk.plan.spec.latent.size == 0;
  const TensorView sums_out = only_rounds && !call_adds ? args.out : TensorView();
  RoutedRows rows = gathers ? run_over_ranks(chunk, args.hidden, routing, marks, sums_out)
                            : run_routed(chunk, routed_source(chunk, args.hidden), routing, marks,
                                         call_adds ? TensorView() : args.out);
  if (rows.form == RoutedRows::Form::kAreOutput) return {};
  CudaTerms terms{.factors = routing.factors, .hidden = args.hidden};
  if (chunk.runs(kShared)) {
    terms.shared = run_on_every_row(chunk.at(kShared), shared_mlp(chunk), given.live.tokens,
                                    source_rows(args.hidden), marks);
  }
  if (chunk.runs(kResidual)) {
    const ConstTensorView& source = args.residual_input.empty() ? args.hidden : args.residual_input;
    terms.residual = run_on_every_row(chunk.at(kResidual), residual_mlp(chunk), given.live.tokens,
                                      source_rows(source), CudaMarks());
  }
  if (chunk.runs(kSum)) rows = sum_slots(chunk.at(kSum), routing, rows);
  if (chunk.runs(kNorm)) norm_sums(chunk.at(kNorm), rows);
  return last_sum(chunk.at(kFinish), routing, rows, terms);
}

// Makes one kernel per row and tile that a ladder names.
class KernelMaker {
 public:
  KernelMaker(const experts::ExpertsProblem& problem, const experts::DeviceExperts& weights,
              CudaKernels& kernels)
      : problem_(problem), weights_(weights), kernels_(kernels) {}

  const experts::DeviceExpertsKernel* kernel(const experts::DeviceKernelRow* row,
                                             const experts::DeviceTile& tile) {
    if (row == nullptr) return nullptr;
    for (const Made& made : made_) {
      if (made.row == row && made.tile == tile) return made.kernel;
    }
    kernels_.owned.push_back(row->make(problem_, weights_, tile));
    made_.push_back({row, tile, kernels_.owned.back().get()});
    return made_.back().kernel;
  }

 private:
  struct Made {
    const experts::DeviceKernelRow* row;
    experts::DeviceTile tile;
    const experts::DeviceExpertsKernel* kernel;
  };
  const experts::ExpertsProblem& problem_;
  const experts::DeviceExperts& weights_;
  CudaKernels& kernels_;
  std::vector<Made> made_;
};

std::optional<experts::RowRounding> rounding_of(const CudaMlpPlan& part,
                                                const experts::LadderRung& rung) {
  if (!part.quantises() || !experts::reads_values(rung, part.problem)) return std::nullopt;
  return experts::row_rounding(part.problem.weight_dtype, part.problem.quant);
}

std::vector<CudaRung> make_rungs(const CudaMlpPlan& part, KernelMaker maker) {
  std::vector<CudaRung> rungs;
  for (const experts::LadderRung& rung : part.ladder) {
    rungs.push_back({.last_tokens = rung.last_tokens,
                     .kernel = maker.kernel(rung.row, rung.tile),
                     .sorted_input = rung.tile.sorted_input,
                     .adds_rows = rung.adds_rows,
                     .rounding = rounding_of(part, rung),
                     .rows_in_lanes = rung.row->decodes_lanes,
                     .skewed = maker.kernel(rung.skewed_row, rung.skewed_tile)});
  }
  return rungs;
}

CudaAdapterKernels make_adapter_kernels(const CudaMlpPlan& part,
                                        const experts::DeviceExperts& weights) {
  CudaAdapterKernels made;
  for (const AdapterRung& rung : part.adapters) {
    made.owned.push_back(rung.row->make(part.problem, weights, rung.tile));
    made.rungs.push_back({.last_tokens = rung.last_tokens,
                          .kernel = made.owned.back().get(),
                          .in_one_pass = rung.in_one_pass});
    const bool rounds = part.quantises() && rung.row->reads_values &&
                        quant::value_rows_support(part.problem.weight_dtype, part.problem.quant);
    CudaRung rows{.last_tokens = rung.last_tokens};
    if (rounds)
      rows.rounding = experts::row_rounding(part.problem.weight_dtype, part.problem.quant);
    made.rows.push_back(rows);
  }
  return made;
}

}  // namespace

CudaKernels make_cuda_kernels(const CudaPlan& plan, const CudaWeights& weights) {
  prepare_launches(plan, weights);
  CudaKernels kernels;
  const auto make = [&](const CudaMlpPlan& part, const CudaMlpWeights& own) {
    return make_rungs(part, KernelMaker(part.problem, own.view, kernels));
  };
  kernels.routed = make(plan.routed, weights.routed);
  for (CudaRung& rung : kernels.routed) {
    rung.finishes_rows = plan.end.writes_output && rung.kernel->finishes_rows();
  }
  if (plan.shared) kernels.shared = make(*plan.shared, weights.shared);
  kernels.routed_adapters = make_adapter_kernels(plan.routed, weights.routed.view);
  if (plan.shared)
    kernels.shared_adapters = make_adapter_kernels(*plan.shared, weights.shared.view);
  if (plan.residual) kernels.residual = make(*plan.residual, weights.residual);
  if (plan.decode_tokens > 0) {
    kernels.decode = plan.decode_row->make(plan.routed.problem, weights.routed.view);
  }
  return kernels;
}

void run_cuda_chunk(const CudaChunk& chunk, const ForwardArgs& args) {
  using enum CudaStage;
  if (chunk.count == 0) {
    // Nothing of the call is read: where a rank has no tokens, nothing was checked.
    if (chunk.runs(kGather)) {
      static_cast<void>(
          run_over_ranks(chunk, args.hidden, CudaRouting(), CudaMarks(), TensorView()));
    }
    return;
  }
  const LiveRows live = live_rows(chunk, args);
  const CudaOutputs outputs{.out = args.out, .shared = args.shared_out};
  if (!chunk.runs(kSumRanks)) {
    if (const LeftSum left = run_own_part(chunk, args, live)) finish_sum(chunk, *left, outputs);
    return;
  }
  ForwardArgs part = args;
  const CudaOutputs parts = rank_parts(chunk.at(kSumRanks), args);
  part.out = parts.out;
  part.shared_out = parts.shared;
  const LeftSum left = run_own_part(chunk, part, live);
  const auto made = left ? *left : made_part(chunk, parts.out);
  if (sum_slices_at_once(chunk.at(kSumRanks), made, live, outputs)) return;
  if (left) finish_sum(chunk, *left, parts);
  const CudaOutputs sums = sum_over_ranks(chunk.at(kSumRanks), parts);
  round_sums_of_ranks(chunk.at(kRound), live, sums, outputs);
}

void count_cuda_chunk(const CudaChunk& chunk, const ForwardArgs& args) {
  if (chunk.count == 0) return;
  CudaGiven given = given_to(chunk, args, live_rows(chunk, args));
  // Experts that the budget bans are not known yet.
  if (args.banned_experts.empty()) given.limits.banned = {};
  enqueue_budget_pass(chunk.at(CudaStage::kRoute), logits_of(chunk, args, {}), given);
}

}  // namespace conclave::inline v0
