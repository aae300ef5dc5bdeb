#include "layer/stages/host_chunk.h"

#include "experts/adapters/factors.h"
#include "experts/quantize_rows.h"
#include "layer/adapters/host_adapter.h"
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
using enum HostStage;

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

const HostAdapterTable& table_of(const AdapterSet& set) {
  return static_cast<const HostAdapterTable&>(*set.table);
}

}  // namespace

// Notes in each row which adapter its token has, for the kernels of any rank.
void HostChunk::mark_rows(const RowBundle& rows, std::byte* memory, int64_t rows_per_token) const {
  if (adapters_ == nullptr) return;
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    experts::set_mark(memory + row * rows.row_bytes, rows.row_bytes,
                      adapter_mark(args_, row / rows_per_token, *adapters_));
  }
}

// The rows in the kernels' format, and in float32 if this call reads them so.
HostChunk::Hidden HostChunk::convert_hidden(const HostScratch& own) const {
  const StageFacts& facts = plan_.facts;
  Hidden hidden;
  if (facts.reads_hidden_rows) {
    hidden.rows = experts::quantize_rows(args_.hidden, facts.hidden_rows.row_dtype,
                                         facts.hidden_rows.row_bytes,
                                         own.at<std::byte>(kHiddenRows), executor_);
    if (facts.marks_hidden_rows) mark_rows(hidden.rows, own.at<std::byte>(kHiddenRows), 1);
  }
  if (facts.hidden_rows_are_float()) {
    hidden.floats = hidden.rows;
    return hidden;
  }
  const bool gate_reads = runs_gate() && args_.router_input.empty();
  if (gate_reads || facts.factors_read_hidden || plan_.spec.latent.size != 0) {
    hidden.floats = experts::quantize_rows(args_.hidden, DType::kF32, plan_.gate_row_bytes,
                                           own.at<std::byte>(kHiddenFloats), executor_);
  }
  return hidden;
}

// The rows that the gate reads: router_input if given, otherwise hidden; normalised in a copy.
RowBundle HostChunk::gate_rows(const HostScratch& own, const Gate& gate,
                               const Hidden& hidden) const {
  auto* const copy = own.at<std::byte>(kGateRows);
  const RowBundle rows = args_.router_input.empty()
                             ? own.made(plan_.facts.floats, hidden.floats)
                             : experts::quantize_rows(args_.router_input, DType::kF32,
                                                      plan_.gate_row_bytes, copy, executor_);
  if (!gate.router.input_norm.enabled) return rows;
  return norm_gate_rows(gate, rows, plan_.gate_row_bytes, copy, executor_);
}

// [T, num_logits]: the caller's logits, or the gate's; null if there are neither, or if the routing
// is given.
const float* HostChunk::logits(const HostScratch& own, const Hidden& hidden) const {
  if (at_.count == 0 || !args_.topk_weights.empty()) return nullptr;
  auto* const logits = own.at<float>(kLogits);
  if (!args_.router_logits.empty()) return dense_logits(args_.router_logits, logits);
  if (!runs_gate()) return nullptr;
  const Gate gate{
      .product = *weights_.gate, .router = plan_.spec.router, .vectors = weights_.router};
  run_gate(gate, gate_rows(own, gate, hidden), logits, executor_);
  return logits;
}

// The logits as the router reads them: those of banned experts lowered in the chunk's own memory.
const float* HostChunk::limited_logits(const HostScratch& own, const float* logits) const {
  if (!bans_.any() || logits == nullptr) return logits;
  auto* const to = own.at<float>(kLogits);
  const MoeSpec& spec = plan_.spec;
  routing::mask_logits(logits, at_.count, num_logits(spec),
                       spec.num_experts + spec.num_zero_experts, bans_, to);
  return to;
}

const Router& HostChunk::router() const {
  const bool fewer = args_.top_k != 0 && args_.top_k < plan_.spec.top_k && at_.count != 0 &&
                     args_.topk_weights.empty();
  if (!fewer) return *plan_.router;
  return plan_.fewer_choices->of(args_.top_k, plan_.router_scratch_bytes, plan_.workers);
}

RouteResult HostChunk::route_tokens(const HostScratch& own, const Hidden& hidden) const {
  const float* const made = logits(own, hidden);
  capture_logits(plan_.spec, at_.count, made, args_.captured_logits);
  const RouteInputs inputs{.num_tokens = at_.count,
                           .first_token = at_.begin,
                           .logits = limited_logits(own, made),
                           .topk_ids = args_.topk_ids,
                           .topk_weights = args_.topk_weights,
                           .token_ids = args_.token_ids,
                           .padding = padding_,
                           .top_k = args_.top_k,
                           .banned = bans_};
  const RouteBuffers buffers{
      .ids = own.at<int32_t>(kTopkIds),
      .weights = own.at<float>(kTopkWeights),
      .shared_weights = plan_.facts.weighs_shared_rows ? own.at<float>(kSharedWeights) : nullptr,
      .given_ids = own.at<int32_t>(kGivenIds),
      .token_ids = own.at<int32_t>(kTokenIds),
      .scratch = own.bytes(kRouterScratch)};
  const RouteResult result = route({.spec = plan_.spec,
                                    .router = router(),
                                    .traits = plan_.router_traits,
                                    .weights = weights_.router.view(),
                                    .id_policy = plan_.options.id_policy},
                                   inputs, buffers, executor_);
  capture_routing(plan_.spec, inputs, result.routing,
                  {.logits = {},
                   .ids = args_.captured_ids,
                   .weights = args_.captured_weights,
                   .expert_load = args_.expert_load});
  return result;
}

// Makes the rows that the routed experts read where these are not hidden itself, and the routing
// that belongs to them.
ExpertInput HostChunk::expert_input(const HostScratch& own, const Hidden& hidden,
                                    const Routing& routing) const {
  ConstTensorView source = args_.hidden;
  if (const int64_t width = plan_.spec.latent.size; width != 0) {
    auto* const latent = own.at<float>(kLatent);
    weights_.latent_down->run(own.made(plan_.facts.floats, hidden.floats), latent, DType::kF32,
                              executor_);
    source = {.data = latent, .dtype = DType::kF32, .shape = {at_.count, width}};
  }
  const Routing& weighed = own.made(kTopkWeights, routing);
  const experts::BatchRequirements wanted = plan_.experts->requirements();
  auto* const to = own.at<std::byte>(kExpertInput);
  const ExpertInput input =
      plan_.spec.weight_on == WeightOn::kOutput
          ? convert_expert_input(source, weighed, wanted, to, executor_)
          : weigh_expert_input(source, weighed, wanted, to, own.at<float>(kUnitWeights), executor_);
  if (plan_.options.max_adapter_rank > 0) mark_rows(input.rows, to, plan_.facts.rows_per_token);
  return input;
}

// Returns the routing as the dispatcher takes it, in physical experts.
Routing HostChunk::send_rows(const HostScratch& own, const ExpertInput& input) const {
  const Routing routing = route_to_replicas(
      {.epoch = epoch_, .first_token = at_.begin, .rows_per_token = plan_.facts.rows_per_token},
      own.made(kTopkIds, input.routing), own.at<int32_t>(kPhysicalIds));
  plan_.dispatcher->begin_dispatch({.routing = own.made(plan_.facts.weights, routing),
                                    .rows = own.made(plan_.facts.expert_input, input.rows),
                                    .epoch = &epoch_},
                                   own.bytes(kDispatch), executor_);
  return routing;
}

Routing HostChunk::route_only() {
  const StageTimer timer(args_.timings, &StageTimings::route_ns);
  return route_tokens(at(kRoute), convert_hidden(at(kHidden))).routing;
}

void HostChunk::begin(KernelCounts& counts) {
  {
    const StageTimer timer(args_.timings, &StageTimings::route_ns);
    results_.hidden = convert_hidden(at(kHidden));
    const RouteResult routed = route_tokens(at(kRoute), results_.hidden);
    results_.routing = routed.routing;
    counts.skipped_ids += routed.counts.skipped_ids;
    counts.tokens_without_finite_logit += routed.counts.tokens_without_finite_logit;
  }
  const StageTimer timer(args_.timings, &StageTimings::dispatch_ns);
  const ExpertInput input =
      runs(kInput) ? expert_input(at(kInput), results_.hidden, results_.routing)
                   : ExpertInput{.rows = results_.hidden.rows, .routing = results_.routing};
  results_.dispatched = send_rows(at(kSendRows), input);
}

bool HostChunk::awaits_rows(const HostScratch& own) const {
  return !plan_.dispatcher->rows_have_come(own.bytes(kDispatch));
}

ExpertOutput HostChunk::run_experts(const HostScratch& own) const {
  ExpertBatch batch;
  {
    const StageTimer timer(args_.timings, &StageTimings::dispatch_ns);
    batch = plan_.dispatcher->await_dispatch(own.bytes(kDispatch));
  }
  const StageTimer timer(args_.timings, &StageTimings::experts_ns);
  const ExpertOutput output{.tag = OutputTag::kPerRow,
                            .rows = own.at<float>(kExpertRows),
                            .row_stride = expert_width(plan_.spec)};
  plan_.experts->run(own.made(plan_.facts.expert_input, batch),
                     {.gate_up = weights_.gate_up.view(),
                      .down = weights_.down.view(),
                      .in_place = weights_.lent_experts.matrices,
                      .adapters = routed_adapters(),
                      .input_scale = weights_.static_scales.input,
                      .intermediate_scale = weights_.static_scales.intermediate},
                     output, own.bytes(kExpertScratch), executor_);
  return output;
}

std::span<const experts::MlpAdapter* const> HostChunk::routed_adapters() const {
  if (adapters_ == nullptr) return {};
  return table_of(*adapters_).routed;
}
std::span<const experts::MlpAdapter* const> HostChunk::shared_adapters() const {
  if (adapters_ == nullptr) return {};
  return table_of(*adapters_).shared;
}

// Everything but the terms that join the sum: those are made while results travel.
dispatch::CombineArgs HostChunk::combine_args(const HostScratch& own) const {
  dispatch::CombineArgs combine{
      .output = own.made(kExpertRows, results_.output),
      .routing = own.made(plan_.facts.ids, own.made(plan_.facts.weights, results_.dispatched)),
      .out = args_.out};
  if (plan_.facts.finishes_apart) {
    combine.out = {.data = own.at<float>(kRoutedSum),
                   .dtype = DType::kF32,
                   .shape = {at_.count, expert_width(plan_.spec)},
                   .row_stride = plan_.facts.routed_sum_stride};
  }
  return combine;
}

void HostChunk::send_results(const HostScratch& own) const {
  const StageTimer timer(args_.timings, &StageTimings::combine_ns);
  plan_.dispatcher->begin_combine(combine_args(own), own.bytes(kDispatch), executor_);
}

SumFactors HostChunk::factors(const HostScratch& own) const {
  const RowBundle hidden = plan_.facts.factors_read_hidden
                               ? own.made(plan_.facts.floats, results_.hidden.floats)
                               : RowBundle();
  return make_factors(plan_.spec.shared,
                      {.shared_gate = weights_.shared_gate.get(),
                       .mix_gate = weights_.mix_gate.get(),
                       .mix_bias = weights_.mix_gate_bias},
                      hidden, own.made(kSharedWeights, results_.routing),
                      {.shared = own.at<float>(kSharedFactor),
                       .routed = own.at<float>(kMix),
                       .mix_logits = own.at<float>(kMixLogits)},
                      executor_);
}

// [T, H] rows, summed over the tensor-parallel ranks if these are added up here.
const float* HostChunk::sum_ranks(const HostScratch& own, const float* rows, HostBuffer to) const {
  const auto elements = static_cast<size_t>(at_.count * plan_.spec.hidden_size);
  return sum_over_tensor_ranks(plan_.part.tensor_communicator, {rows, elements}, own.at<float>(to));
}

// [T, H] with their factors, zero for padding.
const float* HostChunk::run_shared(const HostScratch& own) const {
  float* const rows = run_on_every_row(
      {.kernel = *plan_.shared,
       .weights = {.gate_up = weights_.shared_gate_up.view(),
                   .down = weights_.shared_down.view(),
                   .in_place = weights_.lent_shared.matrices,
                   .adapters = shared_adapters(),
                   .input_scale = weights_.shared_static_scales.input,
                   .intermediate_scale = weights_.shared_static_scales.intermediate},
       .num_experts = plan_.spec.shared.count,
       .hidden_size = plan_.spec.hidden_size},
      own.made(kHiddenRows, results_.hidden.rows),
      {.index = own.at<int64_t>(kSharedIndex),
       .scratch = own.bytes(kSharedScratch),
       .out = own.at<float>(kSharedRows)},
      executor_);
  const SumFactors& factors = own.made(kSharedWeights, own.made(kSharedFactor, results_.factors));
  weigh_shared_rows({.rows = rows, .num_tokens = at_.count, .hidden_size = plan_.spec.hidden_size},
                    factors, padding_, executor_);
  return sum_ranks(own, rows, kReducedShared);
}

// [T, H].
const float* HostChunk::run_residual(const HostScratch& own) const {
  const experts::BatchRequirements wanted = plan_.residual->requirements();
  const RowBundle input =
      args_.residual_input.empty()
          ? own.made(kHiddenRows, results_.hidden.rows)
          : experts::quantize_rows(args_.residual_input, wanted.row_dtype, wanted.row_bytes,
                                   own.at<std::byte>(kResidualInput), executor_);
  const float* const rows =
      run_on_every_row({.kernel = *plan_.residual,
                        .weights = {.gate_up = weights_.residual_gate_up.view(),
                                    .down = weights_.residual_down.view(),
                                    .in_place = weights_.lent_residual.matrices},
                        .hidden_size = plan_.spec.hidden_size},
                       input,
                       {.index = own.at<int64_t>(kResidualIndex),
                        .scratch = own.bytes(kResidualScratch),
                        .out = own.at<float>(kResidualRows)},
                       executor_);
  return sum_ranks(own, rows, kReducedResidual);
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

// These parts read no other rank's rows, so that they run while rows travel.
void HostChunk::run_own_parts() {
  const StageTimer timer(args_.timings, &StageTimings::shared_ns);
  if (runs(kFactors)) results_.factors = factors(at(kFactors));
  results_.shared = hand_out(runs(kShared) ? run_shared(at(kShared)) : nullptr);
  if (runs(kResidual)) results_.residual = run_residual(at(kResidual));
}

void HostChunk::run() {
  const bool fills_wait = runs(kFillWait) && fills_wait_ && awaits_rows(at(kFillWait));
  if (fills_wait) run_own_parts();
  results_.output = run_experts(at(kExperts));
  send_results(at(kSendResults));
  if (!fills_wait) run_own_parts();
}

// Lists the terms that join the routed sum before it is rounded.
dispatch::FinishArgs HostChunk::terms(const HostScratch& own) const {
  const MoeSpec& spec = plan_.spec;
  const bool reduces = plan_.part.reduces();
  dispatch::FinishArgs finish{
      .scale = static_cast<float>(spec.output_scale),
      .mix = own.made(kMix, results_.factors.routed),
      .shared = own.made(reduces ? kReducedShared : kSharedRows, results_.shared),
      .shared_stride = spec.hidden_size,
      .residual = own.made(reduces ? kReducedResidual : kResidualRows, results_.residual),
      .residual_stride = spec.hidden_size};
  if (spec.num_zero_experts > 0 && plan_.part.adds_rest) {
    const Routing& routing = own.made(kTopkIds, own.made(kTopkWeights, results_.routing));
    finish.identity_weights =
        sum_identity_weights(routing, spec.num_experts, own.at<float>(kIdentityWeights));
    finish.identity = args_.hidden;
  }
  if (spec.has_output_bias && plan_.part.adds_rest) finish.bias = weights_.output_bias.data();
  // Shared rows and slots of padding are zero already. Output bias, residual rows and the mix are
  // not, and a norm or a projection may turn a padding row's zeros into NaN.
  const bool reaches_padding = spec.has_output_bias || results_.residual != nullptr ||
                               plan_.facts.mixes || spec.latent.size != 0;
  if (reaches_padding) finish.active = padding_.mask();
  return finish;
}

// Takes the combined sums through what stands between them and the last pass.
dispatch::UnpermuteArgs HostChunk::routed_sums() const {
  const HostScratch combined = at(kCombine);
  plan_.dispatcher->await_combine(combine_args(combined), combined.bytes(kDispatch), executor_);
  const SumRows sums{.rows = combined.at<float>(kRoutedSum),
                     .num_rows = at_.count,
                     .columns = expert_width(plan_.spec),
                     .stride = plan_.facts.routed_sum_stride};
  pad_sums(sums);
  const float* total = sums.rows;
  if (runs(kSumRanks)) {
    const HostScratch own = at(kSumRanks);
    const auto elements = static_cast<size_t>(sums.num_rows * sums.stride);
    total =
        sum_over_tensor_ranks(plan_.part.tensor_communicator,
                              {own.made(kRoutedSum, total), elements}, own.at<float>(kReducedSum));
  }
  const HostBuffer holds = runs(kSumRanks) ? kReducedSum : kRoutedSum;
  const LatentSpec& latent = plan_.spec.latent;
  if (runs(kNorm)) {
    const HostScratch own = at(kNorm);
    rms_norm_sums(own.made(holds, total), weights_.latent_norm, latent.norm_epsilon,
                  own.made(kRoutedSum, sums), executor_);
    total = sums.rows;
  }
  if (!runs(kLatentUp)) return {.rows = total, .row_stride = sums.stride};
  const HostScratch own = at(kLatentUp);
  auto* const projected = own.at<float>(kProjected);
  weights_.latent_up->run(row_bundle(own.made(runs(kNorm) ? kRoutedSum : holds, total), sums),
                          projected, DType::kF32, executor_);
  return {.rows = projected, .row_stride = plan_.spec.hidden_size};
}

void HostChunk::finish() {
  const StageTimer timer(args_.timings, &StageTimings::combine_ns);
  if (runs(kCombine)) {
    dispatch::UnpermuteArgs last = routed_sums();
    last.num_tokens = at_.count;
    last.finish = terms(at(kFinish));
    last.out = args_.out;
    return dispatch::unpermute_reduce(last, executor_);
  }
  const HostScratch own = at(kFinish);
  dispatch::CombineArgs combine = combine_args(own);
  combine.finish = terms(own);
  plan_.dispatcher->await_combine(combine, own.bytes(kDispatch), executor_);
}

}  // namespace conclave::inline v0
