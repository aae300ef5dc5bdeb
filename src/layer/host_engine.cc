#include "layer/host_engine.h"

#include "layer/arguments.h"
#include "layer/own_workspace.h"
#include "layer/packed_weights.h"
#include "layer/pipeline.h"
#include "layer/rank_agreement.h"

#include "conclave/error.h"
#include "conclave/layer.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

namespace conclave::inline v0 {

namespace {

void check_memory(const ForwardArgs& args) {
  if (args.workspace == nullptr || args.workspace->kind() == MemoryKind::kHost) return;
  throw Error(
      ErrorCode::kDevice,
      {.what = "the workspace lies in device memory, the layer is on cpu", .tensor = "workspace"});
}

void check_source_memory(const WeightSource& source) {
  if (source.memory() == MemoryKind::kHost) return;
  throw Error(ErrorCode::kDevice, {.what = "the weights lie in device memory, the layer is on cpu",
                                   .hint = "give the context that device"});
}

// State that all layers on one set of weights share, whatever they plan for.
struct SharedState {
  PackedWeights weights;
  // False from the first byte an in-place reload overwrites until it completes.
  std::atomic<bool> weights_complete{true};
  std::atomic<int64_t> forwards{0};
  std::atomic<int64_t> tokens{0};
  std::atomic<int64_t> skipped_ids{0};
  std::atomic<int64_t> tokens_without_finite_logit{0};
};

class HostEngine final : public Engine {
 public:
  HostEngine(const EngineRequest& request, const WeightSource& source);
  // Runs on the weights of another layer whose request differs only in its options.
  HostEngine(const EngineRequest& request, std::shared_ptr<SharedState> shared);

  void forward(const ForwardArgs& args) override;
  void reload(const WeightSource& source, ReloadMode mode) override;
  const MoeSpec& spec() const noexcept override { return plan_.spec; }
  const ParallelSpec& parallel() const noexcept override { return plan_.parallel; }
  const Plan& plan() const noexcept override { return plan_.summary; }
  LayerStatus status() const override;
  size_t workspace_bytes(int64_t) const override { return plan_.workspace_bytes; }
  std::unique_ptr<Engine> with_max_tokens(int64_t max_tokens) const override;

 private:
  const Context& context_;
  Executor& executor_;
  Communicator* communicator_;
  LayerPlan plan_;
  std::shared_ptr<SharedState> shared_;
  StagedPipeline pipeline_;
  OwnWorkspace own_workspace_;
};

HostEngine::HostEngine(const EngineRequest& request, std::shared_ptr<SharedState> shared)
    : context_(request.context),
      executor_(request.context.executor()),
      communicator_(request.context.communicator()),
      plan_(plan_layer(request.context, request.spec, request.options, request.parallel)),
      shared_(std::move(shared)) {
  check_ranks_agree(plan_, communicator_);
}

HostEngine::HostEngine(const EngineRequest& request, const WeightSource& source)
    : HostEngine(request, std::make_shared<SharedState>()) {
  check_source_memory(source);
  check_source(request.spec, source);
  shared_->weights = allocate_weights(context_, plan_);
  fill_weights(context_, plan_, source, shared_->weights);
}

std::unique_ptr<Engine> HostEngine::with_max_tokens(int64_t max_tokens) const {
  LayerOptions options = plan_.options;
  options.max_tokens = max_tokens;
  return std::make_unique<HostEngine>(
      EngineRequest{
          .context = context_, .spec = plan_.spec, .options = options, .parallel = plan_.parallel},
      shared_);
}

void HostEngine::forward(const ForwardArgs& args) {
  const auto begin = std::chrono::steady_clock::now();
  if (!shared_->weights_complete.load(std::memory_order_acquire)) {
    throw Error(ErrorCode::kState,
                {.what = "an in-place reload failed midway: this layer has no complete weights",
                 .hint = "reload again"});
  }
  check_memory(args);
  const int64_t tokens = check_arguments(args, plan_.spec, plan_.router_traits);
  if (!args.topk_ids.empty() && plan_.options.id_policy == IdPolicy::kStrict) {
    check_ids_strict(args.topk_ids, tokens, plan_.spec);
  }

  OwnWorkspace::Claim own;
  std::span<std::byte> workspace;
  if (args.workspace != nullptr) {
    workspace = args.workspace->memory();
    check_workspace_size(workspace, plan_.workspace_bytes);
  } else {
    own = own_workspace_.claim(context_, plan_.workspace_bytes);
    workspace = own.memory;
  }

  const int64_t chunks = agree_on_chunks(tokens, plan_, communicator_);
  ForwardCounters counters;
  try {
    pipeline_.run({.plan = plan_,
                   .weights = shared_->weights,
                   .args = args,
                   .epoch = *plan_.part.epoch,
                   .tokens = tokens,
                   .chunks = chunks,
                   .workspace = workspace,
                   .executor = executor_},
                  counters);
  } catch (const std::exception& error) {
    give_up(plan_, communicator_, error.what());
    throw;
  }

  constexpr auto kRelaxed = std::memory_order_relaxed;
  shared_->forwards.fetch_add(1, kRelaxed);
  shared_->tokens.fetch_add(tokens, kRelaxed);
  shared_->skipped_ids.fetch_add(counters.skipped_ids, kRelaxed);
  shared_->tokens_without_finite_logit.fetch_add(counters.tokens_without_finite_logit, kRelaxed);
  if (args.timings != nullptr) {
    args.timings->total_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(
                                  std::chrono::steady_clock::now() - begin)
                                  .count();
  }
}

void HostEngine::reload(const WeightSource& source, ReloadMode mode) {
  check_source_memory(source);
  check_source(plan_.spec, source);
  if (mode == ReloadMode::kStaged) {
    PackedWeights staged = allocate_weights(context_, plan_);
    fill_weights(context_, plan_, source, staged);
    shared_->weights = std::move(staged);
  } else {
    shared_->weights_complete.store(false, std::memory_order_release);
    fill_weights(context_, plan_, source, shared_->weights);
  }
  shared_->weights_complete.store(true, std::memory_order_release);
}

LayerStatus HostEngine::status() const {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  return {.forwards = shared_->forwards.load(kRelaxed),
          .tokens = shared_->tokens.load(kRelaxed),
          .skipped_ids = shared_->skipped_ids.load(kRelaxed),
          .tokens_without_finite_logit = shared_->tokens_without_finite_logit.load(kRelaxed)};
}

}  // namespace

std::unique_ptr<Engine> make_host_engine(const EngineRequest& request, const WeightSource& source) {
  return std::make_unique<HostEngine>(request, source);
}

Plan plan_host_engine(const EngineRequest& request) {
  return summarise_plan(request.context, request.spec, request.options, request.parallel);
}

}  // namespace conclave::inline v0
