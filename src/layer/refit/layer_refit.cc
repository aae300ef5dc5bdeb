#include "layer/refit/layer_refit.h"

#include "layer/agreed_values.h"
#include "layer/rank_agreement.h"
#include "layer/refit/rank_words.h"

#include "conclave/error.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr const char* kCommitPhase = "refit: agree to commit";
constexpr const char* kRefusePhase = "broadcast of weights: refuse";

// One rank says this in a commit.
struct CommitOffer {
  RankIntent intent = RankIntent::kWithdraws;
  uint64_t epoch = 0;
  int64_t scope = 0;             // RefitUnits::key
  std::exception_ptr failure{};  // why this rank cannot commit
};

std::exception_ptr withdrawn(std::string_view reason) {
  return std::make_exception_ptr(
      Error(ErrorCode::kState, {.what = "this rank has withdrawn from the refit" +
                                        (reason.empty() ? "" : ": " + std::string(reason))}));
}

// Each group once, in the order in which its ranks are asked.
std::vector<Communicator*> groups_of(const RefitRanks& ranks) {
  std::vector<Communicator*> groups;
  for (Communicator* const one : {ranks.givers, ranks.tensor, ranks.experts}) {
    if (one != nullptr && std::ranges::find(groups, one) == groups.end()) groups.push_back(one);
  }
  return groups;
}

// The groups one after the other, and back: what a rank of the last one says reaches all.
std::vector<Communicator*> steps_of(const RefitRanks& ranks) {
  std::vector<Communicator*> steps = groups_of(ranks);
  for (size_t left = steps.size(); left-- > 1;) steps.push_back(steps[left - 1]);
  return steps;
}

// In each group ranks say whether they go on, as far as they have heard of the other groups, and
// where all do compare what they have staged: all ranks commit or none. Returns what keeps this
// rank from it: its own failure, or what it hears of the others. `first`: steps before are done.
std::exception_ptr agree_to_commit(CommitOffer mine, std::string_view reason,
                                   const RefitRanks& ranks, size_t first = 0) {
  const std::array<AgreedValue, 2> values = {
      AgreedValue{"the epoch", static_cast<int64_t>(mine.epoch)},
      AgreedValue{"the scope", mine.scope}};
  const std::vector<Communicator*> steps = steps_of(ranks);
  for (size_t step = first; step < steps.size(); ++step) {
    Communicator& group = *steps[step];
    const bool shares_layer = &group == ranks.tensor || &group == ranks.experts;
    const bool is_new = step <= steps.size() / 2;
    try {
      if (mine.intent == RankIntent::kWithdraws) {
        exchange_words(mine.intent, reason, group, kCommitPhase);
      } else if (mine.failure) {
        exchange_words(RankIntent::kFails, reason_of(mine.failure), group, kCommitPhase);
      } else {
        exchange_words(RankIntent::kGoesOn, {}, group, kCommitPhase);
        if (shares_layer && is_new) compare_values(values, group, kCommitPhase);
      }
    } catch (const CommError&) {
      if (!mine.failure) mine.failure = std::current_exception();
    }
  }
  return mine.failure;
}

uint64_t epoch_after(uint64_t current, uint64_t wanted) {
  if (wanted == 0) return current + 1;
  // Ranks compare epochs as signed numbers.
  if (wanted > current && wanted <= uint64_t{INT64_MAX}) return wanted;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "the epoch of a refit is larger than the one before",
               .tensor = "RefitOptions.epoch",
               .expected = "more than " + std::to_string(current) + ", less than 2^63",
               .found = std::to_string(wanted)});
}

bool touches_experts(const RefitUnits& scope) {
  return std::ranges::any_of(
      weights::kAll, [&](WeightId id) { return id.mlp().has_value() && scope.has_any(id); });
}

}  // namespace

RefitRanks refit_ranks_of(const PlanBase& plan, Communicator* communicator) noexcept {
  return {.tensor = plan.part.reduces() ? plan.part.tensor_communicator : nullptr,
          .experts = exchanges_tokens(plan) ? communicator : nullptr};
}

void withdraw_from_refit(const RefitRanks& ranks, std::string_view reason) noexcept {
  try {
    agree_to_commit({.failure = withdrawn(reason)}, reason, ranks);
  } catch (const std::exception&) {
    return;  // there was no memory to tell them: the others' commit ends with its deadline
  }
}

LayerRefit::LayerRefit(RefittedLayer layer, const RefitOptions& options)
    : layer_(std::move(layer)),
      mode_(options.mode),
      epoch_(0),
      executor_(options.executor),
      givers_(options.communicator),
      named_(options.scope),
      scope_(units_of(layer_.engine.plan().spec, options.scope)),
      staged_(layer_.engine.plan().spec.num_experts) {
  if (const Support support = layer_.engine.refits(); !support) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "the weights of this layer are not refitted", .hint = support.reason()});
  }
  layer_.epochs.check_at_rest();
  claim_.emplace(layer_.epochs, Claimant::kRefit);
  if (touches_experts(scope_)) {
    check_adapters_stay(*layer_.adapters.current(), layer_.engine.keeps_adapters());
  }
  epoch_ = epoch_after(layer_.refit_epoch.load(std::memory_order_acquire), options.epoch);
  begin(options.keeps_memory);
}

void LayerRefit::begin(bool keeps_memory) {
  const bool is_whole = scope_.covers(all_units(layer_.engine.plan().spec));
  if (!layer_.weights_complete.load(std::memory_order_acquire) && !is_whole) {
    throw Error(ErrorCode::kState,
                {.what = "this layer has no complete weights, of which a part could be refitted",
                 .hint = "reload or refit all of them"});
  }
  if (mode_ != RefitMode::kStaged) {
    const ForwardGate::Closed closed(layer_.gate);
    layer_.engine.make_own(layer_.weights);
  }
  engine_refit_ = layer_.engine.begin_refit(layer_.weights, {.mode = mode_,
                                                             .scope = scope_,
                                                             .gate = layer_.gate,
                                                             .keeps_memory = keeps_memory,
                                                             .places = layer_.places()});
}

void LayerRefit::check_open() const {
  if (claim_) return;
  throw Error(ErrorCode::kState,
              {.what = "this refit has been committed or rolled back", .hint = "begin another"});
}

// Forwards that come now are refused; those under way end first.
void LayerRefit::begin_overwriting() {
  const ForwardGate::Closed closed(layer_.gate);
  layer_.weights_complete.store(false, std::memory_order_release);
}

void LayerRefit::stage(const WeightSource& source, const RefitScope& part) {
  check_open();
  const MoeSpec& spec = layer_.engine.plan().spec;
  const bool is_all = part.experts.empty() && part.tensors.empty();
  const RefitUnits units = is_all ? scope_ : units_of(spec, part);
  if (const std::string extra = scope_.first_missing(units); !extra.empty()) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "staged weights lie outside of the refit",
                                              .tensor = "RefitScope",
                                              .found = extra});
  }
  staged_.remove(units);
  try {
    layer_.engine.check_place(source);
    check_source_of(spec, source, units);
    engine_refit_->stage(
        {.source = source, .units = units, .executor = executor_, .before_overwriting = [this] {
           begin_overwriting();
         }});
    source.check_unchanged();
  } catch (...) {
    stage_failure_ = std::current_exception();
    throw;
  }
  stage_failure_ = nullptr;
  staged_.add(units);
}

RefitRanks LayerRefit::ranks() const {
  RefitRanks ranks = refit_ranks_of(layer_.engine.plan(), layer_.context.communicator());
  ranks.givers = givers_;
  return ranks;
}

void LayerRefit::join(Communicator& communicator) {
  if (givers_ == nullptr) givers_ = &communicator;
  if (givers_ == &communicator) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "the weights of a refit come over one communicator",
               .tensor = "communicator",
               .hint = "give the one that the refit was begun with, or first staged over"});
}

// Weights that have arrived are gone once they are packed: nothing may read them later.
void LayerRefit::check_keeps_own() const {
  if (layer_.engine.plan().summary.in_place_bytes == 0) return;
  throw Error(
      ErrorCode::kUnsupported,
      {.what = "this layer reads experts in the memory of their source, and what another "
               "rank sends has none that stays",
       .tensor = "LayerOptions.weights",
       .hint = "stage a source of this rank's own, or create the layer with packed weights"});
}

void LayerRefit::refuse_broadcast(Communicator& communicator, std::string_view reason) noexcept {
  try {
    exchange_words(RankIntent::kFails, reason, communicator, kRefusePhase);
  } catch (const std::exception&) {
    return;  // the caller has an error of its own
  }
}

// A rank that has withdrawn goes through the same steps: here the first one is done.
void LayerRefit::stage_broadcast(Communicator& communicator, const WeightSource* source,
                                 BroadcastOptions options) {
  check_open();
  try {
    join(communicator);
    check_keeps_own();
  } catch (const Error& error) {
    refuse_broadcast(communicator, error.what());
    throw;
  }
  if (options.part.experts.empty() && options.part.tensors.empty()) options.part = named_;
  try {
    const BroadcastWeights received(layer_.context, communicator, source, options);
    stage(received, options.part);
  } catch (const RankWithdrawn& error) {
    agree_to_commit({.failure = std::current_exception()}, error.what(), ranks(), 1);
    rollback();
    throw;
  }
}

// Why this rank cannot commit.
std::exception_ptr LayerRefit::failure() const {
  const std::string missing = staged_.first_missing(scope_);
  if (missing.empty()) {
    try {
      engine_refit_->prepare();
    } catch (const Error&) {
      return std::current_exception();
    }
    return nullptr;
  }
  if (stage_failure_) return stage_failure_;
  return std::make_exception_ptr(
      Error(ErrorCode::kState, {.what = "a part of the refit is not staged",
                                .tensor = "RefitScope",
                                .found = missing,
                                .hint = "stage it, or begin a refit with a smaller scope"}));
}

// A device that fails in the midst leaves no weights that anyone could vouch for.
void LayerRefit::hand_over(void (EngineRefit::*step)()) {
  try {
    (*engine_refit_.*step)();
  } catch (const Error&) {
    layer_.weights_complete.store(false, std::memory_order_release);
    rollback();
    throw;
  }
}

void LayerRefit::commit() {
  check_open();
  const CommitOffer mine{
      .intent = RankIntent::kGoesOn, .epoch = epoch_, .scope = scope_.key(), .failure = failure()};
  if (const auto reason = agree_to_commit(mine, {}, ranks())) std::rethrow_exception(reason);
  {
    const ForwardGate::Closed closed(layer_.gate);
    hand_over(&EngineRefit::publish);
    layer_.refit_epoch.store(epoch_, std::memory_order_release);
    layer_.weights_complete.store(true, std::memory_order_release);
  }
  hand_over(&EngineRefit::settle);
  rollback();
}

void LayerRefit::withdraw(std::string_view reason) noexcept {
  if (!claim_) return;
  withdraw_from_refit(ranks(), reason);
  rollback();
}

void LayerRefit::rollback() noexcept {
  engine_refit_.reset();
  claim_.reset();
}

}  // namespace conclave::inline v0
