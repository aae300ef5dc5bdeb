#include "layer/stages/input.h"

#include "experts/quantize_rows.h"
#include "layer/stages/route.h"

#include <algorithm>

namespace conclave::inline v0 {
namespace {

// The latent projection, [count, Hl] float32, dense.
ConstTensorView project(const PipelineArgs& args, const RowBundle& hidden_rows) {
  const LatentSpec& latent = args.plan.spec.latent;
  auto* rows = slice_as<float>(args.workspace, args.plan.slices.latent);
  args.weights.latent_down->run(float_rows(args, hidden_rows), rows, DType::kF32, args.executor);
  return {.data = rows, .dtype = DType::kF32, .shape = {args.chunk.count, latent.size}};
}

}  // namespace

RowBundle quantize_hidden(const PipelineArgs& args) {
  const StagePlan& stages = args.plan.stages;
  if (!stages.reads_hidden_rows) return {};
  return experts::quantize_rows(chunk_rows(args.args.hidden, args.chunk),
                                stages.hidden_rows.row_dtype, stages.hidden_rows.row_bytes,
                                slice_as<std::byte>(args.workspace, args.plan.slices.rows),
                                args.executor);
}

ExpertInput make_expert_input(const PipelineArgs& args, const RowBundle& hidden_rows,
                              const Routing& routing) {
  const LayerPlan& plan = args.plan;
  if (!plan.stages.has_expert_input) return {.rows = hidden_rows, .routing = routing};
  const ConstTensorView source = plan.spec.latent.size != 0
                                     ? project(args, hidden_rows)
                                     : chunk_rows(args.args.hidden, args.chunk);
  const experts::BatchRequirements wanted = plan.experts->requirements();
  auto* destination = slice_as<std::byte>(args.workspace, plan.slices.expert_input);
  if (plan.spec.weight_on == WeightOn::kOutput) {
    return {.rows = experts::quantize_rows(source, wanted.row_dtype, wanted.row_bytes, destination,
                                           args.executor),
            .routing = routing};
  }
  auto* ones = slice_as<float>(args.workspace, plan.slices.unit_weights);
  std::fill_n(ones, args.chunk.count * routing.top_k, 1.0F);
  // One row per choice, that is T * k tokens of one choice each.
  return {.rows = experts::quantize_weighted_rows(source, routing.topk_weights, routing.top_k,
                                                  wanted.row_dtype, wanted.row_bytes, destination,
                                                  args.executor),
          .routing = {.num_tokens = routing.num_tokens * routing.top_k,
                      .top_k = 1,
                      .topk_ids = routing.topk_ids,
                      .topk_weights = ones}};
}

RowBundle residual_rows(const PipelineArgs& args, const RowBundle& hidden_rows) {
  if (args.args.residual_input.empty()) return hidden_rows;
  const experts::BatchRequirements wanted = args.plan.residual->requirements();
  return experts::quantize_rows(
      chunk_rows(args.args.residual_input, args.chunk), wanted.row_dtype, wanted.row_bytes,
      slice_as<std::byte>(args.workspace, args.plan.slices.residual_input), args.executor);
}

}  // namespace conclave::inline v0
