#include "layer/cuda/cuda_engine.h"

#include "cuda/check.h"
#include "cuda/device_info.h"
#include "cuda/stream.h"
#include "layer/cuda/adapter_memory.h"
#include "layer/cuda/arguments.h"
#include "layer/cuda/content_hash.h"
#include "layer/cuda/cuda_refit.h"
#include "layer/cuda/cuda_runner.h"
#include "layer/cuda/expert_mover.h"
#include "layer/cuda/route_and_group.h"
#include "layer/cuda/take_over.h"
#include "layer/cuda/weights_on_device.h"
#include "layer/packed_weights.h"
#include "layer/rank_agreement.h"
#include "layer/workspace_memory.h"

#include "conclave/error.h"
#include "conclave/interop/cuda.h"

#include <array>
#include <cuda_runtime_api.h>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

CudaPlanRequest plan_request(const EngineRequest& request, const cuda::DeviceInfo& device) {
  return {.spec = request.spec,
          .options = request.options,
          .parallel = request.parallel,
          .device = device,
          .tensor_communicator = request.context.tensor_communicator(),
          .communicator = request.context.communicator()};
}

// All that a plan asks of the device.
cuda::DeviceInfo device_of(const Context& context) {
  cuda::DeviceInfo device = cuda::device_info(parse_device(context.device()).ordinal);
  const cuda::DeviceGuard guard(device.ordinal);
  constexpr auto kShared = static_cast<int64_t>(kMaxRouteGroupSharedBytes);
  const bool may_hold_more = device.shared_bytes_per_block >= kShared;
  if (most_cluster_blocks(device) > 1 && may_hold_more) {
    device.cluster_blocks = find_cluster_blocks();
  }
  return device;
}

// Places codes for the orders of columns that the weights have.
CudaPlan plan_with_orders(CudaPlanRequest request, const CudaPlan& plan,
                          const WeightSource& source) {
  check_source(request.spec, source);
  const cuda::DeviceGuard guard(request.device.ordinal);
  const cuda::OwnedStream stream = cuda::make_stream();
  request.orders = read_orders(plan, source, to_stream(stream.get()));
  return plan_cuda_layer(request);
}

// Leaves out kernels that do not take the scales that the weights have.
void fit_to_scales(CudaPlanRequest& request, CudaPlan& plan, const WeightSource& source) {
  if (!needs_near_scales(plan)) return;
  check_source(request.spec, source);
  const cuda::DeviceGuard guard(request.device.ordinal);
  const cuda::OwnedStream stream = cuda::make_stream();
  request.scale_span = read_scale_span(plan, source, to_stream(stream.get()));
  plan = plan_cuda_layer(request);
}

// Fuses shared experts into the routed ones' launches, unless that alone would force a copy of
// weights that are usable in place.
CudaPlan plan_for(const EngineRequest& request, const WeightSource& source) {
  const cuda::DeviceInfo device = device_of(request.context);
  CudaPlanRequest plan_wanted = plan_request(request, device);
  CudaPlan plan = plan_cuda_layer(plan_wanted);
  fit_to_scales(plan_wanted, plan, source);
  if (request.spec.quant.has_column_order) return plan_with_orders(plan_wanted, plan, source);
  if (plan.fused.slots() == 0 || source.memory() == MemoryKind::kHost) return plan;
  check_source(request.spec, source);
  plan_wanted.shared = SharedForm::kSeparate;
  CudaPlan separate = plan_cuda_layer(plan_wanted);
  return usable_in_place(separate, source) ? std::move(separate) : std::move(plan);
}

// Ranks of another kind of device have values of other names, and cannot add up with these.
const std::array kOwnValues = {AgreedValue{.name = "a GPU", .value = 1}};

class CudaEngine final : public Engine {
 public:
  CudaEngine(const Context& context, CudaPlan plan)
      : context_(context),
        ordinal_(parse_device(context.device()).ordinal),
        plan_(std::move(plan)) {
    check_workspace_memory(plan_, plan_.device.memory_bytes);
    check_ranks_agree(plan_, kOwnValues, context.communicator());
  }

  const PlanBase& plan() const noexcept override { return plan_; }
  std::unique_ptr<Engine> with_max_tokens(int64_t max_tokens) const override;
  int64_t check(const ForwardArgs& args) const override;
  // Host memory is copied, memory of a device is checked where it is used.
  void check_place(const WeightSource&) const override {}
  std::unique_ptr<LayerWeights> load(const WeightSource& source,
                                     const LayerWeights* replaced) const override;
  void fill(const WeightSource& source, LayerWeights& weights) const override {
    auto& own = static_cast<WeightsOnDevice&>(weights);
    fill_cuda_weights(context_, plan_, source, places_of(&own), own.stream(), own.own);
  }
  KernelCounts counts(const LayerWeights& weights) const override;
  std::unique_ptr<LayerRunner> bind(LayerWeights& weights, const LayerRunner* like) const override {
    return make_cuda_runner(context_, plan_, static_cast<const WeightsOnDevice&>(weights), like);
  }
  Support moves_experts(const LayerWeights& weights) const override;
  MovableExperts movable(LayerWeights& weights, ForwardGate& gate) const override;
  // Nobody asks in a call that has the ranks' tokens, and a graph runs without a host.
  bool may_switch(const ForwardArgs& args) const override {
    return plan_.gathers_rows() && args.rank_tokens.empty() && !is_captured(args.stream);
  }
  void enter_epoch(LayerWeights& weights, const PlacementEpoch& /*next*/,
                   Stream stream) const override {
    auto& own = static_cast<WeightsOnDevice&>(weights);
    own.moves.next.enter(own.own, own.side->fence, to_cuda(stream));
  }
  std::unique_ptr<Engine> on_ranks(const Context& context, const ParallelSpec& parallel,
                                   const WeightSource* source) const override;
  int64_t first_missing(const Engine& from, const LayerWeights& held) const override {
    return conclave::first_missing(plan_, static_cast<const CudaEngine&>(from).lent(held));
  }
  std::unique_ptr<LayerWeights> take_over(const Engine& from, const LayerWeights& held,
                                          const WeightSource* source) const override;
  Support refits() const override { return Support::yes(); }
  std::unique_ptr<EngineRefit> begin_refit(LayerWeights& weights,
                                           const RefitRequest& request) const override;
  std::shared_ptr<const void> reading(const LayerWeights& weights, Stream stream) const override {
    return std::make_shared<WeightFence::Reading>(
        static_cast<const WeightsOnDevice&>(weights).side->fence, to_cuda(stream));
  }
  uint64_t content_hash(const LayerWeights& weights,
                        std::span<const int32_t> places) const override;
  Support takes_adapters() const override { return Support::yes(); }
  bool sees_adapter_ids() const override { return false; }
  bool is_captured(Stream stream) const override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cuda::check(cudaStreamIsCapturing(to_cuda(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
  Support keeps_adapters() const override {
    const auto is_ordered = [](const CudaMlpPlan& mlp) { return mlp.problem.ordered.gate_up != 0; };
    if (!is_ordered(plan_.routed) && !(plan_.shared && is_ordered(*plan_.shared))) {
      return Support::yes();
    }
    return Support::no("their factors lie in the order of the columns that the weights have now");
  }
  std::unique_ptr<EngineAdapter> pack_adapter(const LoraAdapter& adapter,
                                              const LayerWeights& weights,
                                              std::span<const int32_t> experts) const override {
    return upload_adapter(context_, plan_, static_cast<const WeightsOnDevice&>(weights).own,
                          adapter, experts);
  }
  std::shared_ptr<const EngineAdapterTable> adapter_table(
      std::span<const HeldAdapter> adapters) const override {
    return upload_adapter_table(context_, plan_, adapters);
  }
  int32_t enter() const override;
  void leave(int32_t previous) const noexcept override {
    static_cast<void>(cudaSetDevice(previous));
  }

 private:
  HeldCudaWeights lent(const LayerWeights& weights) const {
    return {.plan = plan_,
            .weights = static_cast<const WeightsOnDevice&>(weights).own,
            .places = places_of(&weights)};
  }
  void check_routing(const ForwardArgs& args) const;
  // The expert in each place, where weights, which may be null, have been loaded before.
  std::span<const int32_t> places_of(const LayerWeights* weights) const {
    if (weights == nullptr || weights->experts.empty()) return plan_.part.local_experts;
    return weights->experts;
  }

  const Context& context_;
  const int32_t ordinal_;
  CudaPlan plan_;
};

std::unique_ptr<Engine> CudaEngine::with_max_tokens(int64_t max_tokens) const {
  LayerOptions options = plan_.options;
  options.max_tokens = max_tokens;
  return std::make_unique<CudaEngine>(
      context_, plan_cuda_layer({.spec = plan_.spec,
                                 .options = options,
                                 .parallel = plan_.parallel,
                                 .device = plan_.device,
                                 .shared = plan_.shared_form,
                                 .orders = plan_.orders,
                                 .scale_span = plan_.scale_span,
                                 .tensor_communicator = plan_.part.tensor_communicator,
                                 .communicator = plan_.part.expert_communicator}));
}

// Without a source, what was found in the weights when they were read holds for those that are
// kept, and shared experts stay where they run.
std::unique_ptr<Engine> CudaEngine::on_ranks(const Context& context, const ParallelSpec& parallel,
                                             const WeightSource* source) const {
  if (source != nullptr) return Engine::on_ranks(context, parallel, source);
  return std::make_unique<CudaEngine>(
      context, plan_cuda_layer({.spec = plan_.spec,
                                .options = plan_.options,
                                .parallel = parallel,
                                .device = plan_.device,
                                .shared = plan_.shared ? SharedForm::kSeparate : plan_.shared_form,
                                .orders = plan_.orders,
                                .scale_span = plan_.scale_span,
                                .tensor_communicator = context.tensor_communicator(),
                                .communicator = context.communicator()}));
}

std::unique_ptr<LayerWeights> CudaEngine::take_over(const Engine& from, const LayerWeights& held,
                                                    const WeightSource* source) const {
  auto weights = std::make_unique<WeightsOnDevice>();
  weights->side = std::make_shared<DeviceSide>(context_);
  // A refit may still copy into what is held.
  static_cast<const WeightsOnDevice&>(held).side->fence.follow_copies(weights->side->stream.get());
  weights->own = take_over_cuda_weights(context_, *context_.device_allocator(), plan_,
                                        static_cast<const CudaEngine&>(from).lent(held), source,
                                        weights->stream());
  return weights;
}

std::unique_ptr<LayerWeights> CudaEngine::load(const WeightSource& source,
                                               const LayerWeights* replaced) const {
  auto weights = std::make_unique<WeightsOnDevice>();
  weights->side = replaced != nullptr ? static_cast<const WeightsOnDevice*>(replaced)->side
                                      : std::make_shared<DeviceSide>(context_);
  weights->own =
      allocate_cuda_weights(*context_.device_allocator(), plan_, source, weights->stream());
  if (replaced != nullptr) {
    weights->experts = replaced->experts;
    weights->own.epoch = static_cast<const WeightsOnDevice*>(replaced)->own.epoch;
  }
  fill_cuda_weights(context_, plan_, source, places_of(replaced), weights->stream(), weights->own);
  return weights;
}

Support CudaEngine::moves_experts(const LayerWeights& weights) const {
  const CudaWeights& own = static_cast<const WeightsOnDevice&>(weights).own;
  if (own.routed.in_place) {
    return Support::no("they are read where the caller keeps them, which no other rank shares");
  }
  if (!own.local_expert.empty()) return Support::yes();
  return Support::no("one rank has all of them, without spare places or replicas");
}

MovableExperts CudaEngine::movable(LayerWeights& weights, ForwardGate& gate) const {
  auto& own = static_cast<WeightsOnDevice&>(weights);
  const auto mover =
      std::make_shared<CudaExpertMover>(MovedWeights{.context = context_,
                                                     .allocator = *context_.device_allocator(),
                                                     .plan = plan_,
                                                     .live = own.own,
                                                     .memory = own.moves,
                                                     .fence = own.side->fence,
                                                     .gate = gate});
  return {.memory =
              [mover](bool with_temporary) {
                mover->make_temporary(with_temporary);
                return PlaceMemory({});
              },
          .pack = {},
          .layout_key = key_of_planes(plan_, own.own),
          .device = mover};
}

std::unique_ptr<EngineRefit> CudaEngine::begin_refit(LayerWeights& weights,
                                                     const RefitRequest& request) const {
  const cuda::DeviceGuard guard(ordinal_);
  auto& own = static_cast<WeightsOnDevice&>(weights);
  return std::make_unique<CudaRefit>(RefittedWeights{.context = context_,
                                                     .allocator = *context_.device_allocator(),
                                                     .plan = plan_,
                                                     .live = own.own,
                                                     .spare = own.spare,
                                                     .fence = own.side->fence},
                                     request);
}

uint64_t CudaEngine::content_hash(const LayerWeights& weights,
                                  std::span<const int32_t> places) const {
  const cuda::DeviceGuard guard(ordinal_);
  const auto& own = static_cast<const WeightsOnDevice&>(weights);
  return hash_cuda_weights(plan_, own.own, places, own.side->fence);
}

int32_t CudaEngine::enter() const {
  int previous = 0;
  cuda::check(cudaGetDevice(&previous), "cudaGetDevice");
  if (previous != ordinal_) cuda::check(cudaSetDevice(ordinal_), "cudaSetDevice");
  return previous;
}

void CudaEngine::check_routing(const ForwardArgs& args) const {
  if (plan_.router_limit.empty() || !args.topk_weights.empty()) return;
  throw Error(ErrorCode::kUnsupported,
              {.what = "the router of this layer does not run on CUDA",
               .tensor = args.router_logits.empty() ? "topk_weights" : "router_logits",
               .expected = "topk_ids and topk_weights",
               .found = plan_.router_limit});
}

int64_t CudaEngine::check(const ForwardArgs& args) const {
  check_cuda_arguments(args, plan_.spec, plan_.router_traits, ordinal_);
  check_routing(args);
  if (plan_.gathers_rows() && args.expert_budget != 0) {
    throw Error(
        ErrorCode::kUnsupported,
        {.what = "a budget holds for the tokens of all ranks, and these choose apart on GPUs",
         .tensor = "expert_budget",
         .found = std::to_string(args.expert_budget),
         .hint = "ban experts, or give fewer choices by top_k"});
  }
  if (args.top_k != 0 && args.topk_weights.empty()) {
    static_cast<void>(plan_.router_of(args.top_k));
  }
  return args.hidden.shape[0];
}

KernelCounts CudaEngine::counts(const LayerWeights& weights) const {
  const auto& on_device = static_cast<const WeightsOnDevice&>(weights);
  const DeviceSide& side = *on_device.side;
  CudaCounters counters;
  cuda::check(cudaMemcpyAsync(&counters, side.counters.as(), sizeof(counters),
                              cudaMemcpyDeviceToHost, side.stream.get()),
              "cudaMemcpyAsync");
  cuda::check(cudaStreamSynchronize(side.stream.get()), "cudaStreamSynchronize");
  return {.skipped_ids = static_cast<int64_t>(counters.skipped_ids),
          .tokens_without_finite_logit = static_cast<int64_t>(counters.tokens_without_finite_logit),
          .gate_rows_with_nan = on_device.own.gate_rows_with_nan.get()};
}

}  // namespace

std::unique_ptr<Engine> make_cuda_engine(const EngineRequest& request, const WeightSource& source) {
  return std::make_unique<CudaEngine>(request.context, plan_for(request, source));
}

std::vector<TuningEntry> cuda_candidates(const EngineRequest& request, int64_t tokens) {
  return list_candidates(plan_cuda_layer(plan_request(request, device_of(request.context))),
                         tokens);
}

Plan plan_cuda_engine(const EngineRequest& request) {
  return summarise_cuda_plan(plan_request(request, device_of(request.context)));
}

}  // namespace conclave::inline v0
