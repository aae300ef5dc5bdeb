#include "layer/arguments.h"
#include "layer/packed_weights.h"
#include "layer/pipeline.h"
#include "layer/rank_agreement.h"

#include "conclave/error.h"
#include "conclave/layer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0 {

struct MoeLayer::Impl {
  const Context* context;
  Executor* executor;
  Communicator* communicator;
  LayerPlan plan;
  PackedWeights weights;
  StagedPipeline pipeline;

  // False from the first byte an in-place reload overwrites until it completes.
  std::atomic<bool> weights_complete{true};

  // The layer's own workspace: made by the first forward that brings none.
  std::mutex own_workspace_mutex;
  std::optional<Workspace> own_workspace;

  std::atomic<int64_t> forwards{0};
  std::atomic<int64_t> tokens{0};
  std::atomic<int64_t> skipped_ids{0};
  std::atomic<int64_t> tokens_without_finite_logit{0};
};

namespace {

void check_workspace(std::span<const std::byte> memory, size_t needed) {
  if (memory.size() >= needed) return;
  throw Error(ErrorCode::kWorkspaceTooSmall, {.what = "the workspace is too small for this layer",
                                              .tensor = "workspace",
                                              .expected = std::to_string(needed) + " bytes",
                                              .found = std::to_string(memory.size())});
}

}  // namespace

MoeLayer MoeLayer::create(const Context& context, const MoeSpec& spec, const WeightSource& source,
                          const LayerOptions& options, const ParallelSpec& parallel) {
  auto impl = std::make_unique<Impl>();
  impl->context = &context;
  impl->executor = &context.executor();
  impl->communicator = context.communicator();
  impl->plan = plan_layer(context, spec, options, parallel);
  check_ranks_agree(impl->plan, impl->communicator);
  check_source(spec, source);
  impl->weights = allocate_weights(context, impl->plan);
  fill_weights(context, impl->plan, source, impl->weights);
  return MoeLayer(std::move(impl));
}

MoeLayer::MoeLayer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayer& MoeLayer::operator=(MoeLayer&&) noexcept = default;
MoeLayer::~MoeLayer() = default;

void MoeLayer::forward(const ForwardArgs& args) const {
  Impl& impl = *impl_;
  const auto begin = std::chrono::steady_clock::now();
  if (!impl.weights_complete.load(std::memory_order_acquire)) {
    throw Error(ErrorCode::kState,
                {.what = "an in-place reload failed midway: this layer has no complete weights",
                 .hint = "reload again"});
  }
  const int64_t tokens = check_arguments(args, impl.plan.spec);
  if (!args.topk_ids.empty() && impl.plan.options.id_policy == IdPolicy::kStrict) {
    check_ids_strict(args.topk_ids, tokens, impl.plan.spec);
  }

  std::unique_lock<std::mutex> own_lock(impl.own_workspace_mutex, std::defer_lock);
  std::span<std::byte> workspace;
  if (args.workspace != nullptr) {
    workspace = args.workspace->memory();
    check_workspace(workspace, impl.plan.workspace_bytes);
  } else {
    if (!own_lock.try_lock()) {
      throw Error(ErrorCode::kState, {.what = "another forward is using this layer's own workspace",
                                      .hint = "give each concurrent forward a Workspace"});
    }
    if (!impl.own_workspace) {
      impl.own_workspace.emplace(*impl.context, impl.plan.workspace_bytes);
    }
    workspace = impl.own_workspace->memory();
  }

  const int64_t chunk_tokens = impl.plan.options.max_tokens;
  const int64_t chunks = agree_on_chunks(tokens, impl.plan, impl.communicator);
  ForwardCounters counters;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t first = std::min(chunk * chunk_tokens, tokens);
    const TokenChunk range{.begin = first, .count = std::min(chunk_tokens, tokens - first)};
    impl.pipeline.run({.plan = impl.plan,
                       .weights = impl.weights,
                       .args = args,
                       .chunk = range,
                       .workspace = workspace,
                       .executor = *impl.executor},
                      counters);
  }

  constexpr auto kRelaxed = std::memory_order_relaxed;
  impl.forwards.fetch_add(1, kRelaxed);
  impl.tokens.fetch_add(tokens, kRelaxed);
  impl.skipped_ids.fetch_add(counters.skipped_ids, kRelaxed);
  impl.tokens_without_finite_logit.fetch_add(counters.tokens_without_finite_logit, kRelaxed);
  if (args.timings != nullptr) {
    args.timings->total_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(
                                  std::chrono::steady_clock::now() - begin)
                                  .count();
  }
}

void MoeLayer::reload(const WeightSource& source, ReloadMode mode) {
  Impl& impl = *impl_;
  check_source(impl.plan.spec, source);
  if (mode == ReloadMode::kStaged) {
    PackedWeights staged = allocate_weights(*impl.context, impl.plan);
    fill_weights(*impl.context, impl.plan, source, staged);
    impl.weights = std::move(staged);
  } else {
    impl.weights_complete.store(false, std::memory_order_release);
    fill_weights(*impl.context, impl.plan, source, impl.weights);
  }
  impl.weights_complete.store(true, std::memory_order_release);
}

const MoeSpec& MoeLayer::spec() const noexcept { return impl_->plan.spec; }

const ParallelSpec& MoeLayer::parallel() const noexcept { return impl_->plan.parallel; }

const Plan& MoeLayer::plan() const noexcept { return impl_->plan.summary; }

size_t MoeLayer::workspace_bytes() const noexcept { return impl_->plan.workspace_bytes; }

LayerStatus MoeLayer::status() const noexcept {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  return {.forwards = impl_->forwards.load(kRelaxed),
          .tokens = impl_->tokens.load(kRelaxed),
          .skipped_ids = impl_->skipped_ids.load(kRelaxed),
          .tokens_without_finite_logit = impl_->tokens_without_finite_logit.load(kRelaxed)};
}

}  // namespace conclave::inline v0
