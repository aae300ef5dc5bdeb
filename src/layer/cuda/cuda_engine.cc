#include "layer/cuda/cuda_engine.h"

#include "cuda/check.h"
#include "cuda/device_info.h"
#include "cuda/stream.h"
#include "layer/chunks.h"
#include "layer/cuda/arguments.h"
#include "layer/cuda/every_row.h"
#include "layer/cuda/pipeline.h"
#include "layer/cuda/route_and_group.h"
#include "layer/own_workspace.h"
#include "layer/packed_weights.h"

#include "conclave/error.h"
#include "conclave/interop/cuda.h"

#include <algorithm>
#include <atomic>
#include <cuda_runtime_api.h>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

CudaPlanRequest plan_request(const EngineRequest& request, const cuda::DeviceInfo& device) {
  return {.spec = request.spec,
          .options = request.options,
          .parallel = request.parallel,
          .device = device};
}

// All that a plan asks of the device.
cuda::DeviceInfo device_of(const Context& context) {
  cuda::DeviceInfo device = cuda::device_info(parse_device(context.device()).ordinal);
  const cuda::DeviceGuard guard(device.ordinal);
  if (device.is_hopper()) device.cluster_blocks = find_cluster_blocks();
  return device;
}

// Fuses shared experts into the routed ones' launches, unless that alone would force a copy of
// weights that are usable in place.
CudaPlan plan_for(const EngineRequest& request, const WeightSource& source) {
  const cuda::DeviceInfo device = device_of(request.context);
  CudaPlanRequest plan_wanted = plan_request(request, device);
  CudaPlan plan = plan_cuda_layer(plan_wanted);
  if (plan.fused.slots() == 0 || source.memory() == MemoryKind::kHost) return plan;
  check_source(request.spec, source);
  plan_wanted.shared = SharedForm::kSeparate;
  CudaPlan separate = plan_cuda_layer(plan_wanted);
  return usable_in_place(separate, source) ? std::move(separate) : std::move(plan);
}

class CudaEngine;

// State that all layers on one set of weights share, whatever they plan for.
struct SharedState {
  explicit SharedState(const EngineRequest& request);

  // For create, reload and status, never for a forward.
  cuda::OwnedStream stream;
  CudaWeights weights;
  DeviceMemory counters;
  // False from the first byte an in-place reload overwrites until it completes.
  std::atomic<bool> weights_complete{true};
  std::atomic<int64_t> forwards{0};
  std::atomic<int64_t> tokens{0};

  // All layers bound to the weights' addresses; they are bound again when the addresses change.
  std::mutex mutex;
  std::vector<CudaEngine*> users;
};

class CudaEngine final : public Engine {
 public:
  CudaEngine(const EngineRequest& request, const WeightSource& source);
  // Runs on the weights of `other`, for another number of tokens.
  CudaEngine(const CudaEngine& other, CudaPlan plan);
  CudaEngine(const CudaEngine&) = delete;
  CudaEngine& operator=(const CudaEngine&) = delete;
  ~CudaEngine() override;

  void forward(const ForwardArgs& args) override;
  void reload(const WeightSource& source, ReloadMode mode) override;
  const MoeSpec& spec() const noexcept override { return plan_.spec; }
  const ParallelSpec& parallel() const noexcept override { return plan_.parallel; }
  const Plan& plan() const noexcept override { return plan_.summary; }
  LayerStatus status() const override;
  size_t workspace_bytes(int64_t tokens) const override;
  std::unique_ptr<Engine> with_max_tokens(int64_t max_tokens) const override;

 private:
  CudaWeights load(const WeightSource& source) const;
  void reload_staged(const WeightSource& source);
  void bind();
  WorkspaceBooking booking_in(std::span<const std::byte> workspace, int64_t tokens) const;
  void check_routing(const ForwardArgs& args) const;
  std::span<std::byte> workspace_of_caller(const Workspace& workspace) const;

  const Context& context_;
  const int32_t ordinal_;
  CudaPlan plan_;
  std::shared_ptr<SharedState> shared_;
  std::shared_ptr<const EveryRowIds> every_row_;
  CudaKernels kernels_;                     // bound to the addresses of the shared weights
  std::vector<WorkspaceBooking> bookings_;  // ascending, the last for the most tokens
  OwnWorkspace own_workspace_;
};

cuda::OwnedStream make_stream_on(int32_t ordinal) {
  const cuda::DeviceGuard guard(ordinal);
  return cuda::make_stream();
}

SharedState::SharedState(const EngineRequest& request)
    : stream(make_stream_on(parse_device(request.context.device()).ordinal)) {}

CudaEngine::CudaEngine(const EngineRequest& request, const WeightSource& source)
    : context_(request.context),
      ordinal_(parse_device(request.context.device()).ordinal),
      plan_(plan_for(request, source)),
      shared_(std::make_shared<SharedState>(request)) {
  const cuda::DeviceGuard guard(ordinal_);
  check_source(request.spec, source);
  const Stream stream = to_stream(shared_->stream.get());
  shared_->counters =
      DeviceMemory(*context_.device_allocator(), sizeof(CudaCounters), stream, "counters");
  cuda::check(
      cudaMemsetAsync(shared_->counters.as(), 0, sizeof(CudaCounters), shared_->stream.get()),
      "cudaMemsetAsync");
  shared_->weights = load(source);
  every_row_ = std::make_shared<EveryRowIds>(make_every_row(context_, plan_, stream));
  bind();
}

CudaEngine::CudaEngine(const CudaEngine& other, CudaPlan plan)
    : context_(other.context_),
      ordinal_(other.ordinal_),
      plan_(std::move(plan)),
      shared_(other.shared_),
      every_row_(other.every_row_) {
  const cuda::DeviceGuard guard(ordinal_);
  if (!serves(*every_row_, plan_)) {
    every_row_ = std::make_shared<EveryRowIds>(
        make_every_row(context_, plan_, to_stream(shared_->stream.get())));
  }
  bind();
}

CudaEngine::~CudaEngine() {
  const std::lock_guard lock(shared_->mutex);
  std::erase(shared_->users, this);
}

std::unique_ptr<Engine> CudaEngine::with_max_tokens(int64_t max_tokens) const {
  LayerOptions options = plan_.options;
  options.max_tokens = max_tokens;
  return std::make_unique<CudaEngine>(*this, plan_cuda_layer({.spec = plan_.spec,
                                                              .options = options,
                                                              .parallel = plan_.parallel,
                                                              .device = plan_.device,
                                                              .shared = plan_.shared_form}));
}

// Runs last in a constructor: from then on a reload of any layer sharing the weights finds this
// one.
void CudaEngine::bind() {
  const std::lock_guard lock(shared_->mutex);
  kernels_ = make_cuda_kernels(plan_, shared_->weights);
  bookings_ = book_every_rung(plan_, plan_.options.max_tokens);
  shared_->users.push_back(this);
}

CudaWeights CudaEngine::load(const WeightSource& source) const {
  const Stream stream = to_stream(shared_->stream.get());
  CudaWeights weights = allocate_cuda_weights(context_, plan_, source, stream);
  fill_cuda_weights(context_, plan_, source, stream, weights);
  return weights;
}

// The booking of the call's rung, or, if the caller's workspace is smaller, one for just `tokens`.
WorkspaceBooking CudaEngine::booking_in(std::span<const std::byte> workspace,
                                        int64_t tokens) const {
  const auto serves = [tokens](const WorkspaceBooking& it) { return it.calls.last >= tokens; };
  const WorkspaceBooking& planned = *std::find_if(bookings_.begin(), bookings_.end() - 1, serves);
  if (planned.total_bytes <= workspace.size()) return planned;
  const int64_t least = std::max<int64_t>(tokens, 1);
  WorkspaceBooking smaller = book_workspace(plan_, {.first = least, .last = least});
  check_workspace_size(workspace, smaller.total_bytes);
  return smaller;
}

size_t CudaEngine::workspace_bytes(int64_t tokens) const {
  const int64_t most = plan_.options.max_tokens;
  if (tokens >= most) return plan_.summary.workspace_bytes;
  return conclave::workspace_bytes(plan_, std::max<int64_t>(tokens, 1));
}

void CudaEngine::check_routing(const ForwardArgs& args) const {
  if (plan_.router_limit.empty() || !args.topk_weights.empty()) return;
  throw Error(ErrorCode::kUnsupported,
              {.what = "the router of this layer does not run on CUDA",
               .tensor = args.router_logits.empty() ? "topk_weights" : "router_logits",
               .expected = "topk_ids and topk_weights",
               .found = plan_.router_limit});
}

std::span<std::byte> CudaEngine::workspace_of_caller(const Workspace& workspace) const {
  if (workspace.kind() != MemoryKind::kDevice) {
    throw Error(ErrorCode::kDevice, {.what = "the workspace lies in host memory",
                                     .tensor = "workspace",
                                     .hint = "make it with the layer's context"});
  }
  return workspace.memory();
}

void CudaEngine::forward(const ForwardArgs& args) {
  if (!shared_->weights_complete.load(std::memory_order_acquire)) {
    throw Error(ErrorCode::kState,
                {.what = "an in-place reload failed midway: this layer has no complete weights",
                 .hint = "reload again"});
  }
  check_cuda_arguments(args, plan_.spec, plan_.router_traits, ordinal_);
  check_routing(args);
  const int64_t tokens = args.hidden.shape[0];
  const int64_t most = plan_.options.max_tokens;
  const cuda::DeviceGuard guard(ordinal_);
  OwnWorkspace::Claim own;
  std::span<std::byte> workspace;
  if (args.workspace != nullptr) {
    workspace = workspace_of_caller(*args.workspace);
  } else {
    own = own_workspace_.claim(context_, plan_.summary.workspace_bytes, args.stream);
    workspace = own.memory;
  }
  // Chunks have one of two lengths; both must fit before the first chunk runs.
  const int64_t chunks = num_chunks(tokens, most);
  const int64_t shorter = chunks == 0 ? 0 : tokens / chunks;
  const WorkspaceBooking of_shorter = booking_in(workspace, shorter);
  const bool all_alike = chunks == 0 || tokens % chunks == 0;
  const WorkspaceBooking of_longer = all_alike ? of_shorter : booking_in(workspace, shorter + 1);
  for (int64_t index = 0; index < chunks; ++index) {
    const TokenChunk chunk = chunk_at(tokens, chunks, index);
    run_cuda_chunk({.plan = plan_,
                    .weights = shared_->weights,
                    .every_row = *every_row_,
                    .kernels = kernels_,
                    .slices = (chunk.count > shorter ? of_longer : of_shorter).slices,
                    .args = args,
                    .begin = chunk.begin,
                    .count = chunk.count,
                    .workspace = workspace.data(),
                    .counters = shared_->counters.as<CudaCounters>(),
                    .stream = to_cuda(args.stream)});
  }
  shared_->forwards.fetch_add(1, std::memory_order_relaxed);
  shared_->tokens.fetch_add(tokens, std::memory_order_relaxed);
}

// Makes new kernels for every layer that shares the weights before any of these layers changes.
void CudaEngine::reload_staged(const WeightSource& source) {
  CudaWeights weights = load(source);
  const std::lock_guard lock(shared_->mutex);
  std::vector<CudaKernels> kernels;
  for (const CudaEngine* user : shared_->users) {
    kernels.push_back(make_cuda_kernels(user->plan_, weights));
  }
  shared_->weights = std::move(weights);
  for (size_t i = 0; i < kernels.size(); ++i) {
    shared_->users[i]->kernels_ = std::move(kernels[i]);
  }
}

void CudaEngine::reload(const WeightSource& source, ReloadMode mode) {
  check_source(plan_.spec, source);
  const cuda::DeviceGuard guard(ordinal_);
  if (mode == ReloadMode::kStaged) {
    reload_staged(source);
  } else {
    shared_->weights_complete.store(false, std::memory_order_release);
    fill_cuda_weights(context_, plan_, source, to_stream(shared_->stream.get()), shared_->weights);
  }
  shared_->weights_complete.store(true, std::memory_order_release);
}

LayerStatus CudaEngine::status() const {
  const cuda::DeviceGuard guard(ordinal_);
  CudaCounters counters;
  cuda::check(cudaMemcpyAsync(&counters, shared_->counters.as(), sizeof(counters),
                              cudaMemcpyDeviceToHost, shared_->stream.get()),
              "cudaMemcpyAsync");
  cuda::check(cudaStreamSynchronize(shared_->stream.get()), "cudaStreamSynchronize");
  return {
      .forwards = shared_->forwards.load(std::memory_order_relaxed),
      .tokens = shared_->tokens.load(std::memory_order_relaxed),
      .skipped_ids = static_cast<int64_t>(counters.skipped_ids),
      .tokens_without_finite_logit = static_cast<int64_t>(counters.tokens_without_finite_logit)};
}

}  // namespace

std::unique_ptr<Engine> make_cuda_engine(const EngineRequest& request, const WeightSource& source) {
  return std::make_unique<CudaEngine>(request, source);
}

std::vector<TuningEntry> cuda_candidates(const EngineRequest& request, int64_t tokens) {
  return list_candidates(plan_cuda_layer(plan_request(request, device_of(request.context))),
                         tokens);
}

Plan plan_cuda_engine(const EngineRequest& request) {
  return summarise_cuda_plan(plan_request(request, device_of(request.context)));
}

}  // namespace conclave::inline v0
