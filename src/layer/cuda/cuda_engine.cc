#include "layer/cuda/cuda_engine.h"

#include "cuda/check.h"
#include "cuda/device_info.h"
#include "cuda/stream.h"
#include "layer/chunks.h"
#include "layer/cuda/arguments.h"
#include "layer/cuda/pipeline.h"
#include "layer/own_workspace.h"
#include "layer/packed_weights.h"

#include "conclave/error.h"
#include "conclave/interop/cuda.h"

#include <atomic>
#include <cuda_runtime_api.h>
#include <utility>

namespace conclave::inline v0 {
namespace {

CudaPlanRequest plan_request(const EngineRequest& request, const cuda::DeviceInfo& device) {
  return {.spec = request.spec,
          .options = request.options,
          .parallel = request.parallel,
          .device = device};
}

cuda::DeviceInfo device_of(const Context& context) {
  return cuda::device_info(parse_device(context.device()).ordinal);
}

// Shared experts join the launches of the routed ones, but not where these would have to be copied
// for it.
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

// Weights and what is bound to their addresses.
struct BoundWeights {
  CudaWeights weights;
  CudaKernels kernels;
};

class CudaEngine final : public Engine {
 public:
  CudaEngine(const EngineRequest& request, const WeightSource& source);

  void forward(const ForwardArgs& args) override;
  void reload(const WeightSource& source, ReloadMode mode) override;
  const MoeSpec& spec() const noexcept override { return plan_.spec; }
  const ParallelSpec& parallel() const noexcept override { return plan_.parallel; }
  const Plan& plan() const noexcept override { return plan_.summary; }
  LayerStatus status() const override;

 private:
  BoundWeights load(const WeightSource& source) const;
  std::byte* workspace_of_caller(const Workspace& workspace) const;

  const Context& context_;
  const int32_t ordinal_;
  CudaPlan plan_;
  // Of create, reload and status, never of a forward.
  cuda::OwnedStream stream_;
  BoundWeights bound_;
  WorkspaceBooking booking_;
  DeviceMemory counters_;

  // False from the first byte an in-place reload overwrites until it completes.
  std::atomic<bool> weights_complete_{true};
  OwnWorkspace own_workspace_;

  std::atomic<int64_t> forwards_{0};
  std::atomic<int64_t> tokens_{0};
};

cuda::OwnedStream make_stream_on(int32_t ordinal) {
  const cuda::DeviceGuard guard(ordinal);
  return cuda::make_stream();
}

CudaEngine::CudaEngine(const EngineRequest& request, const WeightSource& source)
    : context_(request.context),
      ordinal_(parse_device(request.context.device()).ordinal),
      plan_(plan_for(request, source)),
      stream_(make_stream_on(ordinal_)) {
  const cuda::DeviceGuard guard(ordinal_);
  check_source(request.spec, source);
  counters_ = DeviceMemory(*context_.device_allocator(), sizeof(CudaCounters),
                           to_stream(stream_.get()), "counters");
  cuda::check(cudaMemsetAsync(counters_.as(), 0, sizeof(CudaCounters), stream_.get()),
              "cudaMemsetAsync");
  bound_ = load(source);
  const int64_t tokens = plan_.options.max_tokens;
  booking_ = book_workspace(plan_, tokens, kernel_bytes(bound_.kernels, tokens));
  summarise_workspace(plan_, [&](int64_t most) { return kernel_bytes(bound_.kernels, most); });
}

BoundWeights CudaEngine::load(const WeightSource& source) const {
  const Stream stream = to_stream(stream_.get());
  BoundWeights bound;
  bound.weights = allocate_cuda_weights(context_, plan_, source, stream);
  fill_cuda_weights(context_, plan_, source, stream, bound.weights);
  bound.kernels = make_cuda_kernels(plan_, bound.weights);
  return bound;
}

std::byte* CudaEngine::workspace_of_caller(const Workspace& workspace) const {
  if (workspace.kind() != MemoryKind::kDevice) {
    throw Error(ErrorCode::kDevice, {.what = "the workspace lies in host memory",
                                     .tensor = "workspace",
                                     .hint = "make it with the layer's context"});
  }
  check_workspace_size(workspace.memory(), booking_.total_bytes);
  return workspace.memory().data();
}

void CudaEngine::forward(const ForwardArgs& args) {
  if (!weights_complete_.load(std::memory_order_acquire)) {
    throw Error(ErrorCode::kState,
                {.what = "an in-place reload failed midway: this layer has no complete weights",
                 .hint = "reload again"});
  }
  check_cuda_arguments(args, plan_.spec, ordinal_);
  const int64_t tokens = args.hidden.shape[0];
  const cuda::DeviceGuard guard(ordinal_);
  OwnWorkspace::Claim own;
  std::byte* workspace = nullptr;
  if (args.workspace != nullptr) {
    workspace = workspace_of_caller(*args.workspace);
  } else {
    own = own_workspace_.claim(context_, booking_.total_bytes, args.stream);
    workspace = own.memory.data();
  }
  const int64_t chunks = num_chunks(tokens, plan_.options.max_tokens);
  for (int64_t index = 0; index < chunks; ++index) {
    const TokenChunk chunk = chunk_at(tokens, chunks, index);
    run_cuda_chunk({.plan = plan_,
                    .weights = bound_.weights,
                    .kernels = bound_.kernels,
                    .slices = booking_.slices,
                    .args = args,
                    .begin = chunk.begin,
                    .count = chunk.count,
                    .workspace = workspace,
                    .counters = counters_.as<CudaCounters>(),
                    .stream = to_cuda(args.stream)});
  }
  forwards_.fetch_add(1, std::memory_order_relaxed);
  tokens_.fetch_add(tokens, std::memory_order_relaxed);
}

void CudaEngine::reload(const WeightSource& source, ReloadMode mode) {
  check_source(plan_.spec, source);
  const cuda::DeviceGuard guard(ordinal_);
  if (mode == ReloadMode::kStaged) {
    bound_ = load(source);
  } else {
    weights_complete_.store(false, std::memory_order_release);
    fill_cuda_weights(context_, plan_, source, to_stream(stream_.get()), bound_.weights);
  }
  weights_complete_.store(true, std::memory_order_release);
}

LayerStatus CudaEngine::status() const {
  const cuda::DeviceGuard guard(ordinal_);
  CudaCounters counters;
  cuda::check(cudaMemcpyAsync(&counters, counters_.as(), sizeof(counters), cudaMemcpyDeviceToHost,
                              stream_.get()),
              "cudaMemcpyAsync");
  cuda::check(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize");
  return {
      .forwards = forwards_.load(std::memory_order_relaxed),
      .tokens = tokens_.load(std::memory_order_relaxed),
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
