#include "layer/stages/cuda/chunk.h"

#include "dispatch/cuda/group.h"
#include "layer/cuda/launch_tables.h"
#include "layer/stages/cuda/factors.h"
#include "layer/stages/cuda/finish.h"
#include "layer/stages/cuda/mlp.h"
#include "layer/stages/cuda/route.h"

#include <algorithm>
#include <optional>

namespace conclave::inline v0 {
namespace {

// Decides when rows are cut for the rung's other kernel.
struct SkewRule {
  int32_t tile_tokens = 0;  // 0: never
  int64_t from = 0;
};
SkewRule skew_rule(const CudaCall& call) {
  const CudaPlan& plan = call.plan;
  const experts::LadderRung& rung = rung_for(plan.routed.ladder, call.count);
  if (rung.skewed_row == nullptr) return {};
  return {.tile_tokens = rung_for(call.kernels.routed, call.count).skewed->tile_tokens(),
          .from = rung.most_even_tiles[static_cast<size_t>(call.count - rung.first_tokens)]};
}

// A rank without experts groups nothing, but still counts the load.
dispatch::DeviceGroupArgs group_args(const CudaCall& call) {
  const CudaPlan& plan = call.plan;
  const int64_t local = plan.routed.problem.num_local_experts;
  const SkewRule skew = local == 0 ? SkewRule() : skew_rule(call);
  return {.launches = routed_launches(plan, call.count),
          .local_expert = call.weights.local_expert.as<int32_t>(),
          .num_experts = plan.num_ids(),
          .num_local_experts = static_cast<int32_t>(std::max<int64_t>(local, 1)),
          .tile_tokens = local == 0
                             ? kLeastGroupTile
                             : rung_for(call.kernels.routed, call.count).kernel->tile_tokens(),
          .expert_load = call.args.expert_load.data(),
          .num_counted = static_cast<int32_t>(plan.spec.num_experts),
          .workspace = call.slice<void>(call.slices.group),
          .skewed_tile_tokens = skew.tile_tokens,
          .skewed_from = skew.from};
}

// The single launch does only the weighted sum over slots.
bool fits_one_launch(const CudaCall& call) {
  return call.count <= call.plan.decode_tokens && call.args.expert_load.empty() &&
         call.args.padding_mask.empty() && call.args.shared_out.empty();
}

// kInDecode: the single launch counts invalid ids, which no earlier launch has checked, and appends
// the slots of shared experts.
enum class IdCheck : uint8_t { kDone, kInDecode };

void run_in_one_launch(const CudaCall& call, const CudaRouting& routing, IdCheck check) {
  const MoeSpec& spec = call.plan.spec;
  const ForwardArgs& args = call.args;
  call.kernels.decode->run(
      {.hidden = chunk_data(call, args.hidden),
       .hidden_dtype = args.hidden.dtype,
       .hidden_stride = stride_of_rows(args.hidden),
       .num_tokens = call.count,
       .live_tokens = routing.live_tokens,
       .shared = check == IdCheck::kInDecode ? shared_slots(call) : SharedSlots(),
       .topk_ids = routing.topk_ids,
       .topk_weights = routing.topk_weights,
       .local_expert = call.weights.local_expert.as<int32_t>(),
       .num_experts = call.plan.num_ids(),
       .skipped_ids = check == IdCheck::kInDecode ? &call.counters->skipped_ids : nullptr,
       .weight_on_input = spec.weight_on == WeightOn::kInput,
       .output_scale = static_cast<float>(spec.output_scale),
       .workspace = call.workspace,
       .out = chunk_data(call, args.out),
       .out_dtype = args.out.dtype,
       .out_stride = stride_of_rows(args.out)},
      call.stream);
}

// Makes one kernel per row and tile that a ladder names.
class KernelMaker {
 public:
  KernelMaker(const experts::ExpertsProblem& problem, const experts::DeviceExperts& weights,
              CudaKernels& kernels)
      : problem_(problem), weights_(weights), kernels_(kernels) {}

  const experts::DeviceExpertsKernel* kernel(const experts::KernelRow* row,
                                             const experts::DeviceTile& tile) {
    if (row == nullptr) return nullptr;
    for (const Made& made : made_) {
      if (made.row == row && made.tile == tile) return made.kernel;
    }
    kernels_.owned.push_back(row->make_on_device(problem_, weights_, tile));
    made_.push_back({row, tile, kernels_.owned.back().get()});
    return made_.back().kernel;
  }

 private:
  struct Made {
    const experts::KernelRow* row;
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
  if (plan.shared) kernels.shared = make(*plan.shared, weights.shared);
  if (plan.residual) kernels.residual = make(*plan.residual, weights.residual);
  if (plan.decode_tokens > 0) {
    kernels.decode = plan.decode_row->make_one_launch(plan.routed.problem, weights.routed.view);
  }
  return kernels;
}

void run_cuda_chunk(const CudaCall& call) {
  if (call.count == 0) return;
  if (fits_one_launch(call)) {
    if (const std::optional<CudaRouting> given = routing_in_place(call)) {
      return run_in_one_launch(call, *given, IdCheck::kInDecode);
    }
    return run_in_one_launch(call, enqueue_routing(call, nullptr), IdCheck::kDone);
  }
  const dispatch::DeviceGroupArgs group = group_args(call);
  const CudaRouting routing = enqueue_routing(call, &group);
  const RoutedRows rows = run_routed(call, routing);
  if (rows == RoutedRows::kAreOutput) return;
  if (call.plan.shared) {
    run_on_every_row(call, shared_mlp(call), routing, source_rows(call, call.args.hidden));
  }
  if (call.plan.residual) {
    const ConstTensorView& given = call.args.residual_input;
    run_on_every_row(call, residual_mlp(call), routing,
                     source_rows(call, given.empty() ? call.args.hidden : given));
  }
  combine_and_finish(call, routing, rows);
}

}  // namespace conclave::inline v0
