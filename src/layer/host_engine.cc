#include "layer/host_engine.h"

#include "layer/arguments.h"
#include "layer/own_workspace.h"
#include "layer/packed_weights.h"
#include "layer/rank_agreement.h"
#include "layer/stages/chunk.h"

#include "conclave/error.h"
#include "conclave/layer.h"

#include <atomic>
#include <memory>
#include <utility>

namespace conclave::inline v0 {

namespace {

struct HostCounts {
  std::atomic<int64_t> skipped_ids{0};
  std::atomic<int64_t> tokens_without_finite_logit{0};
};

struct HostWeights final : LayerWeights {
  PackedWeights packed;
  std::shared_ptr<HostCounts> counts;
};

class HostRunner final : public LayerRunner {
 public:
  HostRunner(const Context& context, const LayerPlan& plan, const HostWeights& weights)
      : executor_(context.executor()), plan_(plan), weights_(weights) {}

  size_t workspace_bytes(int64_t) const override { return plan_.workspace_bytes; }
  void check_workspace(std::span<const std::byte> workspace) const override {
    check_workspace_size(workspace, plan_.workspace_bytes);
  }
  void run(const LayerCall& call) const override;

 private:
  Executor& executor_;
  const LayerPlan& plan_;
  const HostWeights& weights_;
};

void HostRunner::run(const LayerCall& call) const {
  const KernelCounts counted = run_chunks({.plan = plan_,
                                           .weights = weights_.packed,
                                           .args = call.args,
                                           .epoch = *plan_.part.epoch,
                                           .tokens = call.tokens,
                                           .chunks = call.chunks,
                                           .workspace = call.workspace,
                                           .executor = executor_});
  HostCounts& counts = *weights_.counts;
  counts.skipped_ids.fetch_add(counted.skipped_ids, std::memory_order_relaxed);
  counts.tokens_without_finite_logit.fetch_add(counted.tokens_without_finite_logit,
                                               std::memory_order_relaxed);
}

class HostEngine final : public Engine {
 public:
  HostEngine(const EngineRequest& request, const WeightPlaces& places)
      : context_(request.context),
        plan_(
            plan_layer(request.context, request.spec, request.options, request.parallel, places)) {
    check_ranks_agree(plan_, own_agreed_values(plan_), context_.communicator());
  }

  const PlanBase& plan() const noexcept override { return plan_; }
  std::unique_ptr<Engine> with_max_tokens(int64_t max_tokens) const override;
  int64_t check(const ForwardArgs& args) const override;
  void check_place(const WeightSource& source) const override;
  std::unique_ptr<LayerWeights> load(const WeightSource& source,
                                     const LayerWeights* replaced) const override;
  void check_fill(const WeightSource& source, const LayerWeights& weights) const override {
    check_lent(plan_, source, static_cast<const HostWeights&>(weights).packed);
  }
  void fill(const WeightSource& source, LayerWeights& weights) const override {
    fill_weights(context_, plan_, source, static_cast<HostWeights&>(weights).packed);
  }
  KernelCounts counts(const LayerWeights& weights) const override;
  std::unique_ptr<LayerRunner> bind(LayerWeights& weights, const LayerRunner*) const override {
    return std::make_unique<HostRunner>(context_, plan_, static_cast<HostWeights&>(weights));
  }

 private:
  const Context& context_;
  LayerPlan plan_;
};

std::unique_ptr<Engine> HostEngine::with_max_tokens(int64_t max_tokens) const {
  LayerOptions options = plan_.options;
  options.max_tokens = max_tokens;
  return std::make_unique<HostEngine>(
      EngineRequest{
          .context = context_, .spec = plan_.spec, .options = options, .parallel = plan_.parallel},
      WeightPlaces{.known = &plan_.in_place});
}

int64_t HostEngine::check(const ForwardArgs& args) const {
  const int64_t tokens = check_arguments(args, plan_.spec, plan_.router_traits);
  if (!args.topk_ids.empty() && plan_.options.id_policy == IdPolicy::kStrict) {
    check_ids_strict(args.topk_ids, tokens, plan_.spec);
  }
  return tokens;
}

void HostEngine::check_place(const WeightSource& source) const {
  if (source.memory() == MemoryKind::kHost) return;
  throw Error(ErrorCode::kDevice, {.what = "the weights lie in device memory, the layer is on cpu",
                                   .hint = "give the context that device"});
}

std::unique_ptr<LayerWeights> HostEngine::load(const WeightSource& source,
                                               const LayerWeights* replaced) const {
  auto weights = std::make_unique<HostWeights>();
  weights->counts = replaced != nullptr ? static_cast<const HostWeights*>(replaced)->counts
                                        : std::make_shared<HostCounts>();
  weights->packed = allocate_weights(context_, plan_);
  fill_weights(context_, plan_, source, weights->packed);
  return weights;
}

KernelCounts HostEngine::counts(const LayerWeights& weights) const {
  const HostCounts& counts = *static_cast<const HostWeights&>(weights).counts;
  return {.skipped_ids = counts.skipped_ids.load(std::memory_order_relaxed),
          .tokens_without_finite_logit =
              counts.tokens_without_finite_logit.load(std::memory_order_relaxed)};
}

}  // namespace

std::unique_ptr<Engine> make_host_engine(const EngineRequest& request, const WeightSource& source) {
  return std::make_unique<HostEngine>(request, WeightPlaces{.source = &source});
}

Plan plan_host_engine(const EngineRequest& request) {
  return summarise_plan(request.context, request.spec, request.options, request.parallel,
                        {.source = request.source});
}

}  // namespace conclave::inline v0
