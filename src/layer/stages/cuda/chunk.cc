#include "layer/stages/cuda/chunk.h"

#include "dispatch/cuda/group.h"
#include "layer/cuda/book_workspace.h"
#include "layer/cuda/launch_tables.h"
#include "layer/stages/cuda/factors.h"
#include "layer/stages/cuda/finish.h"
#include "layer/stages/cuda/mlp.h"
#include "layer/stages/cuda/route.h"
#include "layer/stages/cuda/rows.h"

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
dispatch::DeviceGroupArgs group_args(const CudaChunk& chunk, std::span<int64_t> expert_load) {
  const CudaPlan& plan = chunk.plan;
  const int64_t local = plan.routed.problem.num_local_experts;
  const SkewRule skew = local == 0 ? SkewRule() : skew_rule(chunk);
  return {.launches = routed_launches(plan, chunk.count),
          .local_expert = chunk.weights.local_expert.as<int32_t>(),
          .num_experts = plan.num_ids(),
          .num_local_experts = static_cast<int32_t>(std::max<int64_t>(local, 1)),
          .tile_tokens = local == 0
                             ? kLeastGroupTile
                             : rung_for(chunk.kernels.routed, chunk.count).kernel->tile_tokens(),
          .expert_load = expert_load.data(),
          .num_counted = static_cast<int32_t>(plan.spec.num_experts),
          .workspace = chunk.scratch.at<void>(CudaBuffer::kGroup),
          .skewed_tile_tokens = skew.tile_tokens,
          .skewed_from = skew.from};
}

// kInDecode: the single launch counts invalid ids, which no earlier launch has checked, and appends
// the slots of shared experts.
enum class IdCheck : uint8_t { kDone, kInDecode };

void run_in_one_launch(const CudaChunk& chunk, const ForwardArgs& args, const CudaRouting& routing,
                       const SharedSlots& shared, IdCheck check) {
  const MoeSpec& spec = chunk.plan.spec;
  chunk.kernels.decode->run(
      {.hidden = args.hidden.data,
       .hidden_dtype = args.hidden.dtype,
       .hidden_stride = stride_of_rows(args.hidden),
       .num_tokens = chunk.count,
       .live_tokens = routing.live.tokens,
       .shared = check == IdCheck::kInDecode ? shared : SharedSlots(),
       .topk_ids = routing.topk_ids,
       .topk_weights = routing.topk_weights,
       .local_expert = chunk.weights.local_expert.as<int32_t>(),
       .num_experts = chunk.plan.num_ids(),
       .skipped_ids = check == IdCheck::kInDecode ? &chunk.counters->skipped_ids : nullptr,
       .weight_on_input = spec.weight_on == WeightOn::kInput,
       .output_scale = static_cast<float>(spec.output_scale),
       .workspace = chunk.scratch.front(),
       .out = args.out.data,
       .out_dtype = args.out.dtype,
       .out_stride = stride_of_rows(args.out)},
      chunk.stream);
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

std::vector<CudaRung> make_rungs(const std::vector<experts::LadderRung>& ladder,
                                 KernelMaker maker) {
  std::vector<CudaRung> rungs;
  for (const experts::LadderRung& rung : ladder) {
    rungs.push_back({.last_tokens = rung.last_tokens,
                     .kernel = maker.kernel(rung.row, rung.tile),
                     .sorted_input = rung.tile.sorted_input,
                     .adds_rows = rung.adds_rows,
                     .skewed = maker.kernel(rung.skewed_row, rung.skewed_tile)});
  }
  return rungs;
}

}  // namespace

CudaKernels make_cuda_kernels(const CudaPlan& plan, const CudaWeights& weights) {
  prepare_launches(plan, weights);
  CudaKernels kernels;
  const auto make = [&](const CudaMlpPlan& part, const CudaMlpWeights& own) {
    return make_rungs(part.ladder, KernelMaker(part.problem, own.view, kernels));
  };
  kernels.routed = make(plan.routed, weights.routed);
  for (CudaRung& rung : kernels.routed) {
    rung.finishes_rows = plan.end.writes_output && rung.kernel->finishes_rows();
  }
  if (plan.shared) kernels.shared = make(*plan.shared, weights.shared);
  if (plan.residual) kernels.residual = make(*plan.residual, weights.residual);
  if (plan.decode_tokens > 0) {
    kernels.decode = plan.decode_row->make(plan.routed.problem, weights.routed.view);
  }
  return kernels;
}

void run_cuda_chunk(const CudaChunk& chunk, const ForwardArgs& args) {
  if (chunk.count == 0) return;
  const LiveRows live{.tokens = live_tokens(chunk, args.num_tokens),
                      .padding_mask = static_cast<const bool*>(args.padding_mask.data)};
  const CudaFactors factors = enqueue_factors(chunk, args.hidden,
                                              {.topk_ids = args.topk_ids,
                                               .topk_weights = args.topk_weights,
                                               .captured_ids = args.captured_ids,
                                               .captured_weights = args.captured_weights,
                                               .live_tokens = live.tokens,
                                               .padding_mask = live.padding_mask});
  const SharedSlots shared = shared_slots(chunk.plan, factors);
  const CudaRouteInputs inputs{
      .gate_rows = args.router_input.empty() ? args.hidden : args.router_input,
      .router_logits = args.router_logits,
      .topk_ids = args.topk_ids,
      .topk_weights = args.topk_weights,
      .token_ids = args.token_ids,
      .live = live};
  const CudaCaptures captures{.logits = args.captured_logits,
                              .ids = args.captured_ids,
                              .weights = args.captured_weights,
                              .expert_load = args.expert_load};
  // A call may add something to the sums of slots that the plan does not know of.
  const bool call_adds = live.padding_mask != nullptr || !args.shared_out.empty();
  if (chunk.count <= chunk.plan.decode_tokens && !call_adds && args.expert_load.empty()) {
    if (const std::optional<CudaRouting> given =
            routing_in_place(chunk.plan.spec, inputs, captures)) {
      return run_in_one_launch(chunk, args, *given, shared, IdCheck::kInDecode);
    }
    return run_in_one_launch(chunk, args, enqueue_routing(chunk, inputs, captures, shared, nullptr),
                             shared, IdCheck::kDone);
  }
  const dispatch::DeviceGroupArgs group = group_args(chunk, args.expert_load);
  const CudaRouting routing = enqueue_routing(chunk, inputs, captures, shared, &group);
  const RoutedRows rows =
      run_routed(chunk, args.hidden, routing, call_adds ? TensorView() : args.out);
  if (rows == RoutedRows::kAreOutput) return;
  if (chunk.plan.shared) {
    run_on_every_row(chunk, shared_mlp(chunk), live.tokens, source_rows(args.hidden));
  }
  if (chunk.plan.residual) {
    const ConstTensorView& given = args.residual_input;
    run_on_every_row(chunk, residual_mlp(chunk), live.tokens,
                     source_rows(given.empty() ? args.hidden : given));
  }
  combine_and_finish(chunk, routing, {.rows = rows, .factors = factors, .hidden = args.hidden},
                     args.out, args.shared_out);
}

}  // namespace conclave::inline v0
