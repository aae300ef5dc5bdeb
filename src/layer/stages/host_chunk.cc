#include "layer/stages/host_chunk.h"

#include "experts/quantize_rows.h"
#include "layer/stages/dense_mlp.h"
#include "layer/stages/finish.h"
#include "layer/stages/ranks.h"
#include "layer/stages/route.h"

#include <chrono>
#include <cstring>

namespace conclave::inline v0 {
namespace {

using Clock = std::chrono::steady_clock;
using enum HostBuffer;

// Adds the time since its construction to one field, if timings are wanted.
class StageTimer {
 public:
  StageTimer(StageTimings* timings, int64_t StageTimings::*field)
      : timings_(timings),
        field_(field),
        begin_(timings != nullptr ? Clock::now() : Clock::time_point()) {}
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;
  ~StageTimer() {
    if (timings_ == nullptr) return;
    timings_->*field_ +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin_).count();
  }

 private:
  StageTimings* timings_;
  int64_t StageTimings::*field_;
  Clock::time_point begin_;
};

// Zero bytes are zero in every activation type.
void fill_zero(const TensorView& rows) {
  const int64_t element = byte_size(rows.dtype);
  for (int64_t row = 0; row < rows.shape[0]; ++row) {
    std::memset(static_cast<std::byte*>(rows.data) + row * rows.row_stride * element, 0,
                static_cast<size_t>(rows.shape[1] * element));
  }
}

}  // namespace

// Stage "hidden rows": the rows in the kernels' format, and in float32 if this call reads them so.
void HostChunk::convert_hidden() {
  const StagePlan& stages = plan_.stages;
  if (stages.reads_hidden_rows) {
    hidden_ = experts::quantize_rows(args_.hidden, stages.hidden_rows.row_dtype,
                                     stages.hidden_rows.row_bytes,
                                     scratch_.at<std::byte>(kHiddenRows), executor_);
  }
  if (stages.hidden_rows_are_float()) {
    hidden_floats_ = hidden_;
    return;
  }
  const bool gate_reads = runs_gate() && args_.router_input.empty();
  if (!gate_reads && !stages.factors_read_hidden && plan_.spec.latent.size == 0) return;
  hidden_floats_ = experts::quantize_rows(args_.hidden, DType::kF32, plan_.gate_row_bytes,
                                          scratch_.at<std::byte>(kHiddenFloats), executor_);
}

// The rows that the gate reads: router_input if given, otherwise hidden; normalised in a copy.
RowBundle HostChunk::gate_rows(const Gate& gate) const {
  auto* const copy = scratch_.at<std::byte>(kGateRows);
  RowBundle rows = hidden_floats_;
  if (!args_.router_input.empty()) {
    rows = experts::quantize_rows(args_.router_input, DType::kF32, plan_.gate_row_bytes, copy,
                                  executor_);
  }
  if (!gate.router.input_norm.enabled) return rows;
  return norm_gate_rows(gate, rows, plan_.gate_row_bytes, copy, executor_);
}

// [T, num_logits]: the caller's logits, or the gate's; null if there are neither, or if the routing
// is given.
const float* HostChunk::logits() const {
  if (at_.count == 0 || !args_.topk_weights.empty()) return nullptr;
  auto* const logits = scratch_.at<float>(kLogits);
  if (!args_.router_logits.empty()) return dense_logits(args_.router_logits, logits);
  if (!runs_gate()) return nullptr;
  const Gate gate{
      .product = *weights_.gate, .router = plan_.spec.router, .vectors = weights_.router};
  run_gate(gate, gate_rows(gate), logits, executor_);
  return logits;
}

// Stage "route".
KernelCounts HostChunk::route_tokens() {
  const RouteInputs inputs{.num_tokens = at_.count,
                           .first_token = at_.begin,
                           .logits = logits(),
                           .topk_ids = args_.topk_ids,
                           .topk_weights = args_.topk_weights,
                           .token_ids = args_.token_ids,
                           .padding = padding_};
  const RouteBuffers buffers{.ids = scratch_.at<int32_t>(kTopkIds),
                             .weights = scratch_.at<float>(kTopkWeights),
                             .shared_weights = plan_.stages.weighs_shared_rows
                                                   ? scratch_.at<float>(kSharedWeights)
                                                   : nullptr,
                             .given_ids = scratch_.at<int32_t>(kGivenIds),
                             .token_ids = scratch_.at<int32_t>(kTokenIds),
                             .scratch = scratch_.bytes(kRouterScratch)};
  const RouteResult result = route({.spec = plan_.spec,
                                    .router = *plan_.router,
                                    .traits = plan_.router_traits,
                                    .weights = weights_.router.view(),
                                    .id_policy = plan_.options.id_policy},
                                   inputs, buffers, executor_);
  capture_routing(plan_.spec, inputs, result.routing,
                  {.logits = args_.captured_logits,
                   .ids = args_.captured_ids,
                   .weights = args_.captured_weights,
                   .expert_load = args_.expert_load});
  routing_ = result.routing;
  return result.counts;
}

// Makes the rows that the routed experts read, and the routing that belongs to them.
ExpertInput HostChunk::expert_input() const {
  if (!plan_.stages.has_expert_input) return {.rows = hidden_, .routing = routing_};
  ConstTensorView source = args_.hidden;
  if (const int64_t width = plan_.spec.latent.size; width != 0) {
    auto* const latent = scratch_.at<float>(kLatent);
    weights_.latent_down->run(hidden_floats_, latent, DType::kF32, executor_);
    source = {.data = latent, .dtype = DType::kF32, .shape = {at_.count, width}};
  }
  const experts::BatchRequirements wanted = plan_.experts->requirements();
  auto* const to = scratch_.at<std::byte>(kExpertInput);
  if (plan_.spec.weight_on == WeightOn::kOutput) {
    return convert_expert_input(source, routing_, wanted, to, executor_);
  }
  return weigh_expert_input(source, routing_, wanted, to, scratch_.at<float>(kUnitWeights),
                            executor_);
}

void HostChunk::begin(KernelCounts& counts) {
  {
    const StageTimer timer(args_.timings, &StageTimings::route_ns);
    convert_hidden();
    const KernelCounts routed = route_tokens();
    counts.skipped_ids += routed.skipped_ids;
    counts.tokens_without_finite_logit += routed.tokens_without_finite_logit;
  }
  const StageTimer timer(args_.timings, &StageTimings::dispatch_ns);
  const ExpertInput input = expert_input();
  dispatched_ = route_to_replicas(
      {.epoch = epoch_, .first_token = at_.begin, .rows_per_token = plan_.stages.rows_per_token},
      input.routing, scratch_.at<int32_t>(kPhysicalIds));
  plan_.dispatcher->begin_dispatch({.routing = dispatched_, .rows = input.rows, .epoch = &epoch_},
                                   scratch_.bytes(kDispatch), executor_);
}

// Stage "experts".
void HostChunk::run_experts() {
  ExpertBatch batch;
  {
    const StageTimer timer(args_.timings, &StageTimings::dispatch_ns);
    batch = plan_.dispatcher->await_dispatch(scratch_.bytes(kDispatch));
  }
  const StageTimer timer(args_.timings, &StageTimings::experts_ns);
  output_ = {.tag = OutputTag::kPerRow,
             .rows = scratch_.at<float>(kExpertRows),
             .row_stride = expert_width(plan_.spec)};
  plan_.experts->run(batch,
                     {.gate_up = weights_.gate_up.data(),
                      .down = weights_.down.data(),
                      .input_scale = weights_.static_scales.input,
                      .intermediate_scale = weights_.static_scales.intermediate},
                     output_, scratch_.bytes(kExpertScratch), executor_);
}

// Everything but the terms that join the sum: those are made while results travel.
dispatch::CombineArgs HostChunk::combine_args() const {
  dispatch::CombineArgs combine{.output = output_, .routing = dispatched_, .out = args_.out};
  if (plan_.stages.finishes_apart) {
    combine.out = {.data = scratch_.at<float>(kRoutedSum),
                   .dtype = DType::kF32,
                   .shape = {at_.count, expert_width(plan_.spec)},
                   .row_stride = plan_.stages.routed_sum_stride};
  }
  return combine;
}

// [T, H] rows, summed over the tensor-parallel ranks if these are added up here.
const float* HostChunk::sum_ranks(const float* rows, HostBuffer to) const {
  const auto elements = static_cast<size_t>(at_.count * plan_.spec.hidden_size);
  return sum_over_tensor_ranks(plan_.part.tensor_communicator, {rows, elements},
                               scratch_.at<float>(to));
}

// Stage "shared experts": [T, H] with their factors, zero for padding; null without them.
const float* HostChunk::run_shared() const {
  if (plan_.shared == nullptr) return nullptr;
  float* const rows = run_on_every_row(
      {.kernel = *plan_.shared,
       .weights = {.gate_up = weights_.shared_gate_up.data(),
                   .down = weights_.shared_down.data(),
                   .input_scale = weights_.shared_static_scales.input,
                   .intermediate_scale = weights_.shared_static_scales.intermediate},
       .num_experts = plan_.spec.shared.count,
       .hidden_size = plan_.spec.hidden_size},
      hidden_,
      {.index = scratch_.at<int64_t>(kSharedIndex),
       .scratch = scratch_.bytes(kSharedScratch),
       .out = scratch_.at<float>(kSharedRows)},
      executor_);
  weigh_shared_rows({.rows = rows, .num_tokens = at_.count, .hidden_size = plan_.spec.hidden_size},
                    factors_, padding_, executor_);
  return sum_ranks(rows, kReducedShared);
}

// Stage "residual MLP": [T, H], or null without one.
const float* HostChunk::run_residual() const {
  if (plan_.residual == nullptr) return nullptr;
  RowBundle input = hidden_;
  if (!args_.residual_input.empty()) {
    const experts::BatchRequirements wanted = plan_.residual->requirements();
    input = experts::quantize_rows(args_.residual_input, wanted.row_dtype, wanted.row_bytes,
                                   scratch_.at<std::byte>(kResidualInput), executor_);
  }
  const float* const rows =
      run_on_every_row({.kernel = *plan_.residual,
                        .weights = {.gate_up = weights_.residual_gate_up.data(),
                                    .down = weights_.residual_down.data()},
                        .hidden_size = plan_.spec.hidden_size},
                       input,
                       {.index = scratch_.at<int64_t>(kResidualIndex),
                        .scratch = scratch_.bytes(kResidualScratch),
                        .out = scratch_.at<float>(kResidualRows)},
                       executor_);
  return sum_ranks(rows, kReducedResidual);
}

// Writes shared rows to the caller's own tensor if there is one; the sum then takes none. The rows
// are zeros if they count on another rank.
const float* HostChunk::hand_out(const float* shared) const {
  if (args_.shared_out.empty()) return shared;
  if (shared == nullptr) {
    fill_zero(args_.shared_out);
  } else {
    convert({.data = shared, .dtype = DType::kF32, .shape = args_.shared_out.shape},
            args_.shared_out);
  }
  return nullptr;
}

void HostChunk::run() {
  run_experts();
  {
    const StageTimer timer(args_.timings, &StageTimings::combine_ns);
    plan_.dispatcher->begin_combine(combine_args(), scratch_.bytes(kDispatch), executor_);
  }
  const StageTimer timer(args_.timings, &StageTimings::shared_ns);
  if (plan_.stages.computes_factors) {
    factors_ = make_factors(plan_.spec.shared,
                            {.shared_gate = weights_.shared_gate.get(),
                             .mix_gate = weights_.mix_gate.get(),
                             .mix_bias = weights_.mix_gate_bias},
                            hidden_floats_, routing_,
                            {.shared = scratch_.at<float>(kSharedFactor),
                             .routed = scratch_.at<float>(kMix),
                             .mix_logits = scratch_.at<float>(kMixLogits)},
                            executor_);
  }
  shared_ = hand_out(run_shared());
  residual_ = run_residual();
}

// Lists the terms that join the routed sum before it is rounded.
dispatch::FinishArgs HostChunk::terms() const {
  const MoeSpec& spec = plan_.spec;
  dispatch::FinishArgs finish{.scale = static_cast<float>(spec.output_scale),
                              .mix = factors_.routed,
                              .shared = shared_,
                              .shared_stride = spec.hidden_size,
                              .residual = residual_,
                              .residual_stride = spec.hidden_size};
  if (spec.num_zero_experts > 0 && plan_.part.adds_rest) {
    finish.identity_weights =
        sum_identity_weights(routing_, spec.num_experts, scratch_.at<float>(kIdentityWeights));
    finish.identity = args_.hidden;
  }
  if (spec.has_output_bias && plan_.part.adds_rest) finish.bias = weights_.output_bias.data();
  // Shared rows and slots of padding are zero already. Output bias, residual rows and the mix are
  // not, and a norm or a projection may turn a padding row's zeros into NaN.
  const bool reaches_padding =
      spec.has_output_bias || residual_ != nullptr || plan_.stages.mixes || spec.latent.size != 0;
  if (reaches_padding) finish.active = padding_.mask();
  return finish;
}

// Does what stands between the combined sums and the last pass: the sum over tensor ranks, the
// norm, and the projection from the latent width.
dispatch::UnpermuteArgs HostChunk::routed_sums() const {
  const SumRows sums{.rows = scratch_.at<float>(kRoutedSum),
                     .num_rows = at_.count,
                     .columns = expert_width(plan_.spec),
                     .stride = plan_.stages.routed_sum_stride};
  pad_sums(sums);
  const auto elements = static_cast<size_t>(sums.num_rows * sums.stride);
  const float* total = sum_over_tensor_ranks(plan_.part.tensor_communicator, {sums.rows, elements},
                                             scratch_.at<float>(kReducedSum));
  const LatentSpec& latent = plan_.spec.latent;
  if (latent.has_norm) {
    rms_norm_sums(total, weights_.latent_norm, latent.norm_epsilon, sums, executor_);
    total = sums.rows;
  }
  if (latent.size == 0) return {.rows = total, .row_stride = sums.stride};
  auto* const projected = scratch_.at<float>(kProjected);
  weights_.latent_up->run(row_bundle(total, sums), projected, DType::kF32, executor_);
  return {.rows = projected, .row_stride = plan_.spec.hidden_size};
}

void HostChunk::finish() {
  const StageTimer timer(args_.timings, &StageTimings::combine_ns);
  dispatch::CombineArgs combine = combine_args();
  const bool apart = plan_.stages.finishes_apart;
  if (!apart) combine.finish = terms();
  plan_.dispatcher->await_combine(combine, scratch_.bytes(kDispatch), executor_);
  if (!apart) return;
  dispatch::UnpermuteArgs last = routed_sums();
  last.num_tokens = at_.count;
  last.finish = terms();
  last.out = args_.out;
  dispatch::unpermute_reduce(last, executor_);
}

}  // namespace conclave::inline v0
