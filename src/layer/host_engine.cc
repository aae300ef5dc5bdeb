#include "layer/host_engine.h"

#include "layer/adapters/host_adapter.h"
#include "layer/arguments.h"
#include "layer/choice_limits.h"
#include "layer/own_workspace.h"
#include "layer/packed_weights.h"
#include "layer/rank_agreement.h"
#include "layer/refit/content_hash.h"
#include "layer/refit/host_refit.h"
#include "layer/regroup/rest_bytes.h"
#include "layer/stages/budget.h"
#include "layer/stages/chunk.h"
#include "layer/take_over.h"
#include "layer/workspace_memory.h"

#include "conclave/error.h"
#include "conclave/layer.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0 {

namespace {

struct HostCounts {
  std::atomic<int64_t> skipped_ids{0};
  std::atomic<int64_t> tokens_without_finite_logit{0};
};

// One place more, for experts that pass through it.
struct TemporaryPlace {
  cpu::Buffer gate_up;
  cpu::Buffer down;
};

struct HostWeights final : LayerWeights {
  PackedWeights packed;
  PackedWeights spare;  // slabs alone, of an earlier refit
  TemporaryPlace temporary;
  std::shared_ptr<HostCounts> counts;
};

class HostRunner final : public LayerRunner {
 public:
  HostRunner(const Context& context, const LayerPlan& plan, const HostWeights& weights)
      : context_(context), plan_(plan), weights_(weights) {}

  size_t workspace_bytes(int64_t) const override { return plan_.workspace_bytes; }
  void check_workspace(std::span<const std::byte> workspace) const override {
    check_workspace_size(workspace, plan_.workspace_bytes);
  }
  void run(const LayerCall& call) const override;

 private:
  Communicator* other_tokens() const;
  KernelCounts run_limited(const HostCall& call) const;

  const Context& context_;
  const LayerPlan& plan_;
  const HostWeights& weights_;
};

// The ranks with whose tokens a call's share experts.
Communicator* HostRunner::other_tokens() const {
  return exchanges_tokens(plan_) ? context_.communicator() : nullptr;
}

KernelCounts HostRunner::run_limited(const HostCall& call) const {
  const std::optional<routing::ExpertBans> bans = bans_of_budget(call, other_tokens());
  ForwardArgs args = call.args;
  if (bans) args.banned_experts = view_of(*bans, call);
  return run_chunks({.plan = call.plan,
                     .weights = call.weights,
                     .args = args,
                     .epoch = call.epoch,
                     .adapters = call.adapters,
                     .tokens = call.tokens,
                     .chunks = call.chunks,
                     .workspace = call.workspace,
                     .executor = call.executor});
}

void HostRunner::run(const LayerCall& call) const {
  const HostCall host{.plan = plan_,
                      .weights = weights_.packed,
                      .args = call.args,
                      .epoch = *call.epoch,
                      .adapters = call.adapters,
                      .tokens = call.tokens,
                      .chunks = call.chunks,
                      .workspace = call.workspace,
                      .executor = context_.executor()};
  const KernelCounts counted = call.args.expert_budget == 0 ? run_chunks(host) : run_limited(host);
  HostCounts& counts = *weights_.counts;
  counts.skipped_ids.fetch_add(counted.skipped_ids, std::memory_order_relaxed);
  counts.tokens_without_finite_logit.fetch_add(counted.tokens_without_finite_logit,
                                               std::memory_order_relaxed);
}

// Slabs of ranks with the same key have the same bytes for the same expert.
int64_t layout_key(const LayerPlan& plan) {
  const experts::SlabBytes bytes = plan.experts->slab_bytes();
  const size_t layout = std::hash<std::string>()(plan.experts->packed_layout());
  return static_cast<int64_t>(layout ^ (bytes.gate_up << 20U) ^ bytes.down);
}

class HostEngine final : public Engine, public PeerWeights {
 public:
  HostEngine(const EngineRequest& request, const WeightPlaces& places)
      : context_(request.context),
        plan_(
            plan_layer(request.context, request.spec, request.options, request.parallel, places)) {
    check_workspace_memory(plan_);
    std::vector<AgreedValue> own = own_agreed_values(plan_);
    // Without a source they agree next on what is missing.
    own.push_back({"weight source", places.source != nullptr ? 1 : 0});
    check_ranks_agree(plan_, own, context_.communicator());
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
    make_own(weights);
    fill_weights(context_, plan_, source, experts_of(&weights),
                 static_cast<HostWeights&>(weights).packed);
  }
  bool shares_memory(const LayerWeights& weights) const override;
  void make_own(LayerWeights& weights) const override;
  Support moves_experts(const LayerWeights& weights) const override;
  MovableExperts movable(LayerWeights& weights, ForwardGate& gate) const override;
  KernelCounts counts(const LayerWeights& weights) const override;
  std::unique_ptr<Engine> on_ranks(const Context& context, const ParallelSpec& parallel,
                                   const WeightSource* source) const override;
  int64_t first_missing(const Engine& from, const LayerWeights& held) const override;
  std::unique_ptr<LayerWeights> take_over(const Engine& from, const LayerWeights& held,
                                          const WeightSource* source) const override;
  Support refits() const override { return Support::yes(); }
  std::unique_ptr<EngineRefit> begin_refit(LayerWeights& weights,
                                           const RefitRequest& request) const override {
    auto& own = static_cast<HostWeights&>(weights);
    return std::make_unique<HostRefit>(context_, plan_, own.packed, own.spare, request);
  }
  uint64_t content_hash(const LayerWeights& weights,
                        std::span<const int32_t> places) const override {
    return conclave::content_hash(plan_, static_cast<const HostWeights&>(weights).packed, places);
  }
  const PeerWeights* peer_weights() const override { return this; }
  Support supported() const override;
  int64_t form_key() const override;
  std::vector<std::byte> rest(const LayerWeights& weights) const override;
  std::unique_ptr<LayerWeights> keep(const Engine& from, const LayerWeights& held,
                                     std::span<const int32_t> experts) const override;
  std::unique_ptr<LayerWeights> begin() const override;
  void take_rest(std::span<const std::byte> bytes, LayerWeights& weights) const override;
  void read_experts(const WeightSource& source, std::span<const int32_t> experts,
                    LayerWeights& weights) const override;
  PlaceMemory places(LayerWeights& weights) const override;
  Support takes_adapters() const override { return Support::yes(); }
  std::unique_ptr<EngineAdapter> pack_adapter(const LoraAdapter& adapter,
                                              const LayerWeights& /*weights*/,
                                              std::span<const int32_t> experts) const override {
    return pack_host_adapter(context_, plan_, adapter, experts);
  }
  std::shared_ptr<const EngineAdapterTable> adapter_table(
      std::span<const HeldAdapter> adapters) const override {
    return host_adapter_table(adapters);
  }
  std::unique_ptr<LayerRunner> bind(LayerWeights& weights, const LayerRunner*) const override {
    return std::make_unique<HostRunner>(context_, plan_, static_cast<HostWeights&>(weights));
  }

 private:
  std::span<const int32_t> experts_of(const LayerWeights* weights) const {
    if (weights == nullptr || weights->experts.empty()) return plan_.part.local_experts;
    return weights->experts;
  }
  HeldWeights held(const LayerWeights& weights) const;
  PlaceMemory place_memory(HostWeights& weights, bool with_temporary) const;

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

std::unique_ptr<Engine> HostEngine::on_ranks(const Context& context, const ParallelSpec& parallel,
                                             const WeightSource* source) const {
  const EngineRequest request{
      .context = context, .spec = plan_.spec, .options = plan_.options, .parallel = parallel};
  if (source != nullptr) return make_host_engine(request, *source);
  return std::make_unique<HostEngine>(request, WeightPlaces{.known = &plan_.in_place});
}

HeldWeights HostEngine::held(const LayerWeights& weights) const {
  return {.plan = plan_,
          .packed = static_cast<const HostWeights&>(weights).packed,
          .experts = experts_of(&weights)};
}

int64_t HostEngine::first_missing(const Engine& from, const LayerWeights& weights) const {
  const HeldWeights held = static_cast<const HostEngine&>(from).held(weights);
  if (!has_same_form(plan_, held.plan)) return plan_.spec.num_experts;
  const std::vector<int32_t> places = places_held(plan_, held);
  const auto missing = std::ranges::find(places, -1);
  if (missing == places.end()) return -1;
  return plan_.part.local_experts[static_cast<size_t>(missing - places.begin())];
}

std::unique_ptr<LayerWeights> HostEngine::take_over(const Engine& from, const LayerWeights& old,
                                                    const WeightSource* source) const {
  auto weights = std::make_unique<HostWeights>();
  weights->counts = std::make_shared<HostCounts>();
  weights->packed =
      take_over_weights(context_, plan_, static_cast<const HostEngine&>(from).held(old), source);
  return weights;
}

int64_t HostEngine::check(const ForwardArgs& args) const {
  const int64_t tokens = check_arguments(args, plan_.spec, plan_.router_traits);
  check_choice_limits(ChoiceLimits::of(args), plan_.spec, args.hidden.shape[0], tokens);
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
  fill_weights(context_, plan_, source, experts_of(replaced), weights->packed);
  return weights;
}

bool HostEngine::shares_memory(const LayerWeights& weights) const {
  const PackedWeights& packed = static_cast<const HostWeights&>(weights).packed;
  return std::ranges::any_of(kSlabsOfWeights,
                             [&](auto slabs) { return (packed.*slabs).is_shared(); });
}

void HostEngine::make_own(LayerWeights& weights) const {
  PackedWeights& packed = static_cast<HostWeights&>(weights).packed;
  for (const auto slabs : kSlabsOfWeights) {
    (packed.*slabs).make_own(context_.host_allocator(), context_.executor());
  }
}

Support HostEngine::supported() const {
  if (!reads_in_place(plan_)) return Support::yes();
  return Support::no("weights are read in their source's memory, which no other rank shares");
}

int64_t HostEngine::form_key() const { return conclave::form_key(plan_); }

std::vector<std::byte> HostEngine::rest(const LayerWeights& weights) const {
  return bytes_of_rest(static_cast<const HostWeights&>(weights).packed);
}

std::unique_ptr<LayerWeights> HostEngine::keep(const Engine& from, const LayerWeights& held,
                                               std::span<const int32_t> experts) const {
  auto weights = std::make_unique<HostWeights>();
  weights->counts = std::make_shared<HostCounts>();
  weights->packed = keep_weights(context_, plan_,
                                 {.plan = static_cast<const HostEngine&>(from).plan_,
                                  .packed = static_cast<const HostWeights&>(held).packed,
                                  .experts = experts});
  return weights;
}

std::unique_ptr<LayerWeights> HostEngine::begin() const {
  auto weights = std::make_unique<HostWeights>();
  weights->counts = std::make_shared<HostCounts>();
  weights->packed = allocate_weights(context_, plan_);
  return weights;
}

void HostEngine::take_rest(std::span<const std::byte> bytes, LayerWeights& weights) const {
  read_rest(bytes, context_, plan_, static_cast<HostWeights&>(weights).packed);
}

void HostEngine::read_experts(const WeightSource& source, std::span<const int32_t> experts,
                              LayerWeights& weights) const {
  check_place(source);
  check_source(plan_.spec, source);
  pack_routed_experts(context_, plan_, source, experts, static_cast<HostWeights&>(weights).packed);
}

PlaceMemory HostEngine::places(LayerWeights& weights) const {
  const PackedWeights& packed = static_cast<const HostWeights&>(weights).packed;
  const experts::SlabBytes bytes = plan_.experts->slab_bytes();
  return PlaceMemory({PlaceMemory::Kind{.each = packed.gate_up.each(), .bytes = bytes.gate_up},
                      PlaceMemory::Kind{.each = packed.down.each(), .bytes = bytes.down}});
}

Support HostEngine::moves_experts(const LayerWeights& /*weights*/) const {
  if (!InPlaceParts::is(plan_.in_place.routed)) return Support::yes();
  return Support::no("they are read in their source's memory, which no other rank shares");
}

PlaceMemory HostEngine::place_memory(HostWeights& weights, bool with_temporary) const {
  const experts::SlabBytes bytes = plan_.experts->slab_bytes();
  TemporaryPlace& temporary = weights.temporary;
  if (!with_temporary) temporary = {};
  if (with_temporary && temporary.gate_up.size() == 0) {
    temporary.gate_up = cpu::Buffer(context_.host_allocator(), bytes.gate_up);
    temporary.down = cpu::Buffer(context_.host_allocator(), bytes.down);
  }
  return PlaceMemory({PlaceMemory::Kind{.each = weights.packed.gate_up.each(),
                                        .bytes = bytes.gate_up,
                                        .temporary = temporary.gate_up.data()},
                      PlaceMemory::Kind{.each = weights.packed.down.each(),
                                        .bytes = bytes.down,
                                        .temporary = temporary.down.data()}});
}

MovableExperts HostEngine::movable(LayerWeights& weights, ForwardGate& /*gate*/) const {
  auto& own = static_cast<HostWeights&>(weights);
  return {.memory = [this, &own](bool temporary) { return place_memory(own, temporary); },
          .pack =
              [this](const WeightSource& source, int32_t expert, std::span<std::byte> gate_up,
                     std::span<std::byte> down) {
                check_place(source);
                check_source(plan_.spec, source);
                pack_expert(context_, plan_, source, expert,
                            {.gate_up = gate_up.data(), .down = down.data()});
              },
          .layout_key = layout_key(plan_)};
}

KernelCounts HostEngine::counts(const LayerWeights& weights) const {
  const auto& own = static_cast<const HostWeights&>(weights);
  const HostCounts& counts = *own.counts;
  return {.skipped_ids = counts.skipped_ids.load(std::memory_order_relaxed),
          .tokens_without_finite_logit =
              counts.tokens_without_finite_logit.load(std::memory_order_relaxed),
          .gate_rows_with_nan = own.packed.gate_rows_with_nan.get()};
}

}  // namespace

std::unique_ptr<Engine> make_host_engine(const EngineRequest& request, const WeightSource& source) {
  return std::make_unique<HostEngine>(request, WeightPlaces{.source = &source});
}

std::unique_ptr<Engine> make_unfilled_host_engine(const EngineRequest& request) {
  const InPlaceParts none;
  return std::make_unique<HostEngine>(request, WeightPlaces{.known = &none});
}

Plan plan_host_engine(const EngineRequest& request) {
  return summarise_plan(request.context, request.spec, request.options, request.parallel,
                        {.source = request.source});
}

}  // namespace conclave::inline v0
