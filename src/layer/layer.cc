#include "layer/layer.h"

#include "layer/arguments.h"
#include "layer/known_scales.h"
#include "layer/migration/update_placement.h"
#include "layer/packed_weights.h"
#include "layer/rank_agreement.h"

#include "conclave/error.h"
#include "conclave/lora.h"

#include <chrono>
#include <exception>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

using Clock = std::chrono::steady_clock;

// Keeps an engine's device current.
class OnDevice {
 public:
  explicit OnDevice(const Engine& engine) : engine_(engine), previous_(engine.enter()) {}
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { engine_.leave(previous_); }

 private:
  const Engine& engine_;
  int32_t previous_;
};

// Throws Error(kUnsupported) for a layer that is to take adapters on a device that cannot.
void check_adapter_support(const Engine& engine) {
  if (engine.plan().options.max_adapter_rank == 0) return;
  const Support support = engine.takes_adapters();
  if (support) return;
  throw Error(ErrorCode::kUnsupported,
              {.what = "this device takes no adapters",
               .tensor = "LayerOptions.max_adapter_rank",
               .found = std::to_string(engine.plan().options.max_adapter_rank),
               .hint = support.reason()});
}

void check_weights(const Engine& engine, const WeightSource& source) {
  engine.check_place(source);
  check_source(engine.plan().spec, source);
}

std::unique_ptr<Engine> make_engine(const EngineRequest& request, const WeightSource& source) {
  const MoeSpec spec = with_known_scales(request.spec, source);
  return engine_row(request.context)
      .make({.context = request.context,
             .spec = spec,
             .options = request.options,
             .parallel = request.parallel},
            source);
}

// The expert in each place of this rank, -1 for a free one.
std::vector<int32_t> places_in(const PlacementEpoch& epoch, const PlanBase& plan) {
  if (epoch.number == 0) return plan.part.local_experts;
  const auto experts = epoch.places.of_rank(plan.parallel.ep_rank)
                           .first(static_cast<size_t>(plan.part.num_places()));
  return {experts.begin(), experts.end()};
}

// Throws unless the caller's workspace is memory of the context's device.
void check_kind(const Workspace& workspace, const Context& context) {
  const bool on_device = context.device_allocator() != nullptr;
  if (on_device == (workspace.kind() == MemoryKind::kDevice)) return;
  if (on_device) {
    throw Error(ErrorCode::kDevice, {.what = "the workspace lies in host memory",
                                     .tensor = "workspace",
                                     .hint = "make it with the layer's context"});
  }
  throw Error(
      ErrorCode::kDevice,
      {.what = "the workspace lies in device memory, the layer is on cpu", .tensor = "workspace"});
}

}  // namespace

Layer::Layer(const EngineRequest& request, const WeightSource& source)
    : context_(request.context),
      spec_(request.spec),
      engine_(make_engine(request, source)),
      shared_(std::make_shared<Shared>(basis().part.epoch)) {
  check_adapter_support(*engine_);
  check_weights(*engine_, source);
  const OnDevice scope(*engine_);
  shared_->weights = engine_->load(source, nullptr);
  source.check_unchanged();
  bind(nullptr);
}

Layer::Layer(const Layer& other, int64_t max_tokens)
    : context_(other.context_),
      spec_(other.spec_),
      engine_(other.engine_->with_max_tokens(max_tokens)),
      shared_(other.shared_) {
  const OnDevice scope(*engine_);
  bind(&other);
}

Layer::Layer(const Layer& other, const Context& context, const ParallelSpec& parallel,
             const WeightSource* source)
    : context_(context),
      spec_(other.spec_),
      engine_(other.engine_on(context, parallel, source)),
      shared_(std::make_shared<Shared>(basis().part.epoch)) {
  other.note_places();
  const LayerWeights& held = *other.shared_->weights;
  if (source != nullptr) {
    check_weights(*engine_, *source);
  } else {
    check_nothing_is_missing(engine_->first_missing(*other.engine_, held), basis(),
                             context_.communicator());
  }
  const OnDevice scope(*engine_);
  shared_->weights = engine_->take_over(*other.engine_, held, source);
  if (source != nullptr) source->check_unchanged();
  bind(nullptr);
}

Layer::Layer(const Context& context, LayerAfter after)
    : context_(context),
      spec_(std::move(after.spec)),
      engine_(std::move(after.engine)),
      shared_(std::make_shared<Shared>(basis().part.epoch)) {
  const OnDevice scope(*engine_);
  shared_->weights = std::move(after.weights);
  bind(nullptr);
}

std::unique_ptr<Engine> Layer::engine_on(const Context& context, const ParallelSpec& parallel,
                                         const WeightSource* source) const {
  check_complete();
  shared_->epochs.check_at_rest();
  if (context.device() != context_.device()) {
    throw Error(ErrorCode::kDevice, {.what = "a layer stays on its device when its ranks change",
                                     .tensor = "context",
                                     .expected = std::string(context_.device()),
                                     .found = std::string(context.device())});
  }
  return engine_->on_ranks(context, parallel, source);
}

Layer::~Layer() {
  const std::lock_guard lock(shared_->mutex);
  std::erase(shared_->users, this);
}

// Runs last in a constructor: from then on a reload of any layer on these weights finds this one.
void Layer::bind(const Layer* like) {
  const std::lock_guard lock(shared_->mutex);
  runner_ = engine_->bind(*shared_->weights, like != nullptr ? like->runner_.get() : nullptr);
  shared_->users.push_back(this);
}

void Layer::check_complete() const {
  if (shared_->weights_complete.load(std::memory_order_acquire)) return;
  throw Error(
      ErrorCode::kState,
      {.what = "an in-place reload or refit is under way, or ended midway: this layer has no "
               "complete weights",
       .hint = "let it end, or reload all of them"});
}

std::span<std::byte> Layer::workspace_of(const ForwardArgs& args, OwnWorkspace::Claim& own) {
  if (args.workspace != nullptr) {
    check_kind(*args.workspace, context_);
    return args.workspace->memory();
  }
  own = own_workspace_.claim(context_, plan().workspace_bytes, args.stream);
  return own.memory;
}

void Layer::run(const LayerCall& call) const {
  try {
    runner_->run(call);
  } catch (const std::exception& error) {
    give_up(basis(), context_.communicator(), error.what());
    throw;
  }
}

EpochPointer Layer::take_up(const EpochOffer& offer, uint64_t agreed, Stream stream) const {
  if (agreed == offer.current->number) return offer.current;
  try {
    engine_->enter_epoch(*shared_->weights, *offer.next, stream);
  } catch (const std::exception& error) {
    give_up(basis(), context_.communicator(), error.what());
    throw;
  }
  return shared_->epochs.take(offer, agreed);
}

void Layer::forward(const ForwardArgs& args) {
  const Clock::time_point begin = args.timings != nullptr ? Clock::now() : Clock::time_point();
  const ForwardGate::Pass pass(shared_->gate);
  check_complete();
  if (context_.device_allocator() != nullptr && names_adapters(args)) {
    refuse_adapters(args, engine_->takes_adapters());
  }
  const int64_t tokens = engine_->check(args);
  check_rank_tokens(args, basis().parallel);
  const AdapterSetPointer adapters = shared_->adapters.current();
  const bool names_some = engine_->sees_adapter_ids()
                              ? check_adapter_ids(args, tokens, *adapters)
                              : check_unseen_adapter_ids(args, *adapters, basis().options);
  const OnDevice scope(*engine_);
  OwnWorkspace::Claim own;
  const std::span<std::byte> workspace = workspace_of(args, own);
  runner_->check_workspace(workspace);
  const bool may_use_adapters = names_some || (exchanges_tokens(basis()) && !adapters->empty());
  if (may_use_adapters && engine_->is_captured(args.stream)) {
    shared_->adapters.keep_for_graphs(adapters);
  }
  EpochOffer offer = shared_->epochs.offer();
  if (offer.next != nullptr && !engine_->may_switch(args)) offer.next = nullptr;
  const CallAgreement agreed =
      agree_on_call({.tokens = tokens,
                     .adapters = adapters->key,
                     .adapters_are_compared = has_compared(*adapters),
                     .names_adapters = names_some,
                     .refit_epoch = shared_->refit_epoch.load(std::memory_order_acquire),
                     .expert_budget = args.expert_budget,
                     .rank_tokens = args.rank_tokens},
                    offer, basis(), context_.communicator());
  shared_->compared_adapters.store(adapters->key, std::memory_order_relaxed);
  const EpochPointer epoch = take_up(offer, agreed.epoch, args.stream);
  // Rows of other ranks may have adapters where this rank's have none.
  const bool uses_adapters = agreed.names_adapters && !adapters->empty();
  run({.args = args,
       .tokens = tokens,
       .chunks = agreed.chunks,
       .workspace = workspace,
       .epoch = epoch.get(),
       .rank_tokens = agreed.tokens,
       .adapters = uses_adapters ? adapters.get() : nullptr});
  shared_->forwards.fetch_add(1, std::memory_order_relaxed);
  shared_->tokens.fetch_add(tokens, std::memory_order_relaxed);
  if (args.timings != nullptr) {
    args.timings->total_ns +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
  }
}

bool Layer::has_compared(const AdapterSet& adapters) const {
  return shared_->compared_adapters.load(std::memory_order_relaxed) == adapters.key;
}

// Binds every layer on these weights to the new ones before any of them changes.
void Layer::reload_staged(const WeightSource& source) {
  std::unique_ptr<LayerWeights> weights = engine_->load(source, shared_->weights.get());
  source.check_unchanged();
  const std::lock_guard lock(shared_->mutex);
  std::vector<std::unique_ptr<LayerRunner>> runners;
  for (const Layer* user : shared_->users) {
    runners.push_back(user->engine_->bind(*weights, user->runner_.get()));
  }
  for (size_t i = 0; i < runners.size(); ++i) shared_->users[i]->runner_ = std::move(runners[i]);
  shared_->weights = std::move(weights);
}

Support Layer::moves_experts() const {
  if (shared_->adapters.current()->empty()) return engine_->moves_experts(*shared_->weights);
  return Support::no("they have adapters, which stay: remove these before and add them again");
}

std::vector<int32_t> Layer::places() const {
  return places_in(*shared_->epochs.current(), basis());
}

AdapterId Layer::add_adapter(const LoraAdapter& adapter) {
  if (const Support support = engine_->takes_adapters(); !support) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "this layer takes no adapters", .hint = support.reason()});
  }
  const int64_t max_rank = basis().options.max_adapter_rank;
  if (max_rank == 0) {
    throw Error(ErrorCode::kState, {.what = "this layer was made without room for adapters",
                                    .tensor = "LayerOptions.max_adapter_rank",
                                    .found = "0"});
  }
  check_adapter(adapter, basis().spec, max_rank);
  std::unique_lock<std::mutex> packing;
  std::optional<EpochClaim> claim;
  if (engine_->keeps_adapters()) {
    shared_->epochs.check_at_rest(true);
  } else {
    packing = std::unique_lock(shared_->packing);
    claim.emplace(shared_->epochs, Claimant::kRefit);
  }
  return shared_->adapters.add(
      adapter, engine_->pack_adapter(adapter, *shared_->weights, places()),
      [this](std::span<const HeldAdapter> held) { return engine_->adapter_table(held); });
}

void Layer::remove_adapter(AdapterId id) {
  shared_->adapters.remove(
      id, [this](std::span<const HeldAdapter> held) { return engine_->adapter_table(held); });
}

void Layer::note_places() const {
  if (shared_->epochs.current()->number == 0) return;
  shared_->weights->experts = places();
}

// Experts are packed where they lie now, not where they lay at first.
void Layer::reload(const WeightSource& source, ReloadMode mode) {
  shared_->epochs.check_at_rest();
  const EpochClaim claim(shared_->epochs, Claimant::kRefit);
  check_adapters_stay(*shared_->adapters.current(), engine_->keeps_adapters());
  check_weights(*engine_, source);
  note_places();
  const OnDevice scope(*engine_);
  if (mode == ReloadMode::kStaged) {
    reload_staged(source);
  } else {
    engine_->check_fill(source, *shared_->weights);
    shared_->weights_complete.store(false, std::memory_order_release);
    engine_->fill(source, *shared_->weights);
    source.check_unchanged();
  }
  shared_->weights_complete.store(true, std::memory_order_release);
}

RefittedLayer Layer::lend_to_refit() const {
  struct Owners {
    std::shared_ptr<Engine> engine;
    std::shared_ptr<Shared> shared;
  };
  const auto places = [shared = shared_.get(), engine = engine_.get()] {
    return places_in(*shared->epochs.current(), engine->plan());
  };
  return {.owners = std::make_shared<Owners>(engine_, shared_),
          .engine = *engine_,
          .weights = *shared_->weights,
          .epochs = shared_->epochs,
          .adapters = shared_->adapters,
          .gate = shared_->gate,
          .weights_complete = shared_->weights_complete,
          .refit_epoch = shared_->refit_epoch,
          .places = places,
          .context = context_};
}

RefitRanks Layer::refit_ranks() const noexcept {
  return refit_ranks_of(engine_->plan(), context_.communicator());
}

uint64_t Layer::content_hash() const {
  const EpochSwitch::Hold hold(shared_->epochs);
  const ForwardGate::Pass pass(shared_->gate);
  check_complete();
  return engine_->content_hash(*shared_->weights, places());
}

Layer::Replay Layer::begin_replay(Stream stream) const {
  Replay replay{.owners = shared_,
                .pass = std::make_unique<const ForwardGate::Pass>(shared_->gate),
                .reading = nullptr};
  check_complete();
  const OnDevice scope(*engine_);
  replay.reading = engine_->reading(*shared_->weights, stream);
  return replay;
}

// In the background nothing may take the weights from under a forward.
Support Layer::moves_in_background() const {
  // A claim of the layer is the better reason, and is found next.
  if (shared_->epochs.is_claimed() || !engine_->shares_memory(*shared_->weights)) {
    return moves_experts();
  }
  return Support::no(
      "another layer still reads the same memory, the one that this was taken to other ranks from "
      "or one that was taken from this: destroy that one first, or use update_placement");
}

MigratingLayer Layer::lend() const {
  struct Owners {
    std::shared_ptr<Engine> engine;
    std::shared_ptr<Shared> shared;
  };
  return {.owners = std::make_shared<Owners>(engine_, shared_),
          .plan = basis(),
          .epochs = shared_->epochs,
          .experts = engine_->movable(*shared_->weights, shared_->gate),
          .movable = moves_in_background(),
          .adapters = shared_->adapters.current()->key,
          .communicator = context_.communicator()};
}

LayerBefore Layer::lend_to_ranks() const {
  std::exception_ptr refusal;
  try {
    check_complete();
  } catch (const Error&) {
    refusal = std::current_exception();
  }
  return {.context = context_,
          .spec = spec_,
          .engine = *engine_,
          .weights = *shared_->weights,
          .epochs = shared_->epochs,
          .places = [this] { return places(); },
          .refusal = refusal};
}

void Layer::update_placement(const ExpertSlots& slots, const MigrationOptions& options,
                             std::exception_ptr refusal) {
  try {
    check_complete();
    // Memory that a refit shares or writes must not move.
    shared_->epochs.check_unclaimed();
    engine_->make_own(*shared_->weights);
  } catch (const Error&) {
    refusal = std::current_exception();
  }
  const MigratingLayer layer = lend();
  conclave::update_placement({.plan = layer.plan,
                              .communicator = layer.communicator,
                              .epochs = layer.epochs,
                              .movable = layer.movable,
                              .adapters = layer.adapters,
                              .experts = layer.experts,
                              .slots = slots,
                              .options = options,
                              .refusal = std::move(refusal)});
}

ExpertSlots Layer::slots_of_split(const ParallelSpec& next) const {
  const ParallelSpec& own = basis().parallel;
  const auto need = [](const char* field, int64_t mine, int64_t given) {
    if (mine == given) return;
    throw Error(ErrorCode::kInvalidArgument, {.what = "a layer keeps its split over ranks",
                                              .tensor = field,
                                              .expected = std::to_string(mine),
                                              .found = std::to_string(given)});
  };
  need("ep_size", own.ep_size, next.ep_size);
  need("ep_rank", own.ep_rank, next.ep_rank);
  need("tp_size", own.tp_size, next.tp_size);
  need("tp_rank", own.tp_rank, next.tp_rank);
  need("reduce", static_cast<int64_t>(own.reduce), static_cast<int64_t>(next.reduce));
  return slots_of(spec_.num_experts, next);
}

LayerStatus Layer::status() const {
  const OnDevice scope(*engine_);
  const KernelCounts counts = engine_->counts(*shared_->weights);
  return {.forwards = shared_->forwards.load(std::memory_order_relaxed),
          .tokens = shared_->tokens.load(std::memory_order_relaxed),
          .skipped_ids = counts.skipped_ids,
          .tokens_without_finite_logit = counts.tokens_without_finite_logit,
          .refit_epoch = shared_->refit_epoch.load(std::memory_order_acquire),
          .gate_rows_with_nan = counts.gate_rows_with_nan};
}

}  // namespace conclave::inline v0
