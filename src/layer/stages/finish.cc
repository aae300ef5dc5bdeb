#include "layer/stages/finish.h"

#include "cpu/parallel.h"
#include "dispatch/finish.h"
#include "dispatch/unpermute_reduce.h"
#include "layer/stages/ranks.h"
#include "layer/stages/route.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace conclave::inline v0 {
namespace {

constexpr int64_t kRowsPerTask = 16;

// to = from / sqrt(mean(from^2) + epsilon) * weight, in float32 except for the sum of squares. `to`
// may be `from`.
void rms_norm(const float* from, const std::vector<float>& weight, double epsilon, float* to) {
  double squares = 0;
  const size_t columns = weight.size();
  for (size_t col = 0; col < columns; ++col) squares += double{from[col]} * double{from[col]};
  const double mean = squares / static_cast<double>(columns);
  const auto factor = static_cast<float>(1.0 / std::sqrt(mean + epsilon));
  for (size_t col = 0; col < columns; ++col) to[col] = from[col] * factor * weight[col];
}

// Normalises rows of routed_sum_stride elements.
void norm_rows(const PipelineArgs& args, const float* from, float* to) {
  const int64_t stride = args.plan.stages.routed_sum_stride;
  cpu::parallel_for(args.executor, args.chunk.count, kRowsPerTask,
                    [&](int64_t begin, int64_t end, int32_t) noexcept {
                      for (int64_t row = begin; row < end; ++row) {
                        rms_norm(from + row * stride, args.weights.latent_norm,
                                 args.plan.spec.latent.norm_epsilon, to + row * stride);
                      }
                    });
}

// [count]: the weights of each token's zero experts, added in the order of its slots.
const float* sum_identity_weights(const PipelineArgs& args, const Routing& routing) {
  auto* sums = slice_as<float>(args.workspace, args.plan.slices.identity_weights);
  for (int64_t token = 0; token < routing.num_tokens; ++token) {
    sums[token] = 0;
    for (int64_t at = token * routing.top_k; at < (token + 1) * routing.top_k; ++at) {
      if (routing.topk_ids[at] >= args.plan.spec.num_experts)
        sums[token] += routing.topk_weights[at];
    }
  }
  return sums;
}

dispatch::FinishArgs finish_args(const PipelineArgs& args, const FinishInputs& inputs) {
  const MoeSpec& spec = args.plan.spec;
  dispatch::FinishArgs finish{.scale = static_cast<float>(spec.output_scale),
                              .shared = inputs.shared,
                              .shared_stride = spec.hidden_size,
                              .residual = inputs.residual,
                              .residual_stride = spec.hidden_size};
  if (spec.num_zero_experts > 0 && args.plan.part.adds_rest) {
    finish.identity_weights = sum_identity_weights(args, inputs.routing);
    finish.identity = chunk_rows(args.args.hidden, args.chunk);
  }
  if (spec.has_output_bias && args.plan.part.adds_rest)
    finish.bias = args.weights.output_bias.data();
  if (args.plan.stages.mixes) {
    finish.mix = slice_as<float>(args.workspace, args.plan.slices.mix);
  }
  // Shared rows and slots of padding are zero already. Output bias, residual rows and the mix are
  // not, and a norm or a projection may turn a padding row's zeros into NaN.
  const bool reaches_padding = spec.has_output_bias || inputs.residual != nullptr ||
                               args.plan.stages.mixes || spec.latent.size != 0;
  if (reaches_padding && !args.args.padding_mask.empty()) {
    finish.active = static_cast<const uint8_t*>(args.args.padding_mask.data) + args.chunk.begin;
  }
  return finish;
}

std::span<std::byte> dispatch_workspace(const PipelineArgs& args) {
  return args.workspace.subspan(args.plan.slices.dispatch.offset, args.plan.slices.dispatch.bytes);
}

// Everything but the terms that join the sum: those are made while results travel.
dispatch::CombineArgs combine_args(const PipelineArgs& args, const FinishInputs& inputs) {
  dispatch::CombineArgs combine{.output = inputs.output, .routing = inputs.dispatched, .out = {}};
  if (!args.plan.stages.finishes_apart) {
    combine.out = chunk_rows(args.args.out, args.chunk);
    return combine;
  }
  combine.out = {.data = slice_as<float>(args.workspace, args.plan.slices.routed_sum),
                 .dtype = DType::kF32,
                 .shape = {args.chunk.count, expert_width(args.plan.spec)},
                 .row_stride = args.plan.stages.routed_sum_stride};
  return combine;
}

// The weighted sums over slots, normalised if the spec says so, [count, W] float32 in rows of
// routed_sum_stride, zero padded: a RowBundle for the projection.
RowBundle combine_routed(const PipelineArgs& args, const FinishInputs& inputs) {
  const int64_t width = expert_width(args.plan.spec);
  const int64_t stride = args.plan.stages.routed_sum_stride;
  auto* sums = slice_as<float>(args.workspace, args.plan.slices.routed_sum);
  args.plan.dispatcher->await_combine(combine_args(args, inputs), dispatch_workspace(args),
                                      args.executor);
  for (int64_t row = 0; row < args.chunk.count; ++row) {
    std::fill(sums + row * stride + width, sums + (row + 1) * stride, 0.0F);
  }
  const float* total = sum_over_tensor_ranks(args, sums, stride, args.plan.slices.reduced_sum);
  if (args.plan.spec.latent.has_norm) {
    norm_rows(args, total, sums);
    total = sums;
  }
  return {.rows = static_cast<const std::byte*>(static_cast<const void*>(total)),
          .num_rows = args.chunk.count,
          .row_bytes = stride * int64_t{sizeof(float)},
          .dtype = DType::kF32};
}

// [count, H]: the latent sums projected up, or the sums themselves.
dispatch::UnpermuteArgs routed_rows(const PipelineArgs& args, const RowBundle& sums) {
  if (args.plan.spec.latent.size == 0) {
    return {.rows = static_cast<const float*>(static_cast<const void*>(sums.rows)),
            .row_stride = args.plan.stages.routed_sum_stride};
  }
  auto* projected = slice_as<float>(args.workspace, args.plan.slices.projected);
  args.weights.latent_up->run(sums, projected, DType::kF32, args.executor);
  return {.rows = projected, .row_stride = args.plan.spec.hidden_size};
}

}  // namespace

void begin_combine(const PipelineArgs& args, const FinishInputs& inputs) {
  args.plan.dispatcher->begin_combine(combine_args(args, inputs), dispatch_workspace(args),
                                      args.executor);
}

void combine_and_finish(const PipelineArgs& args, const FinishInputs& inputs) {
  const dispatch::FinishArgs finish = finish_args(args, inputs);
  if (!args.plan.stages.finishes_apart) {
    dispatch::CombineArgs combine = combine_args(args, inputs);
    combine.finish = finish;
    args.plan.dispatcher->await_combine(combine, dispatch_workspace(args), args.executor);
    return;
  }
  const RowBundle sums = combine_routed(args, inputs);
  dispatch::UnpermuteArgs last = routed_rows(args, sums);
  last.num_tokens = args.chunk.count;
  last.finish = finish;
  last.out = chunk_rows(args.args.out, args.chunk);
  dispatch::unpermute_reduce(last, args.executor);
}

}  // namespace conclave::inline v0
