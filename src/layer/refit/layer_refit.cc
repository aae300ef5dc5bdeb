#include "layer/refit/layer_refit.h"

#include "layer/agreed_values.h"
#include "layer/rank_agreement.h"

#include "conclave/error.h"

#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr const char* kCommitPhase = "refit: agree to commit";

enum class Intent : uint8_t { kWithdraw, kCommit };

// One rank says this in a commit.
struct CommitOffer {
  Intent intent = Intent::kWithdraw;
  uint64_t epoch = 0;
  int64_t scope = 0;             // RefitUnits::key
  std::exception_ptr failure{};  // why this rank cannot commit
};

std::exception_ptr withdrawn() {
  return std::make_exception_ptr(
      Error(ErrorCode::kState, {.what = "this rank has withdrawn from the refit"}));
}

// Both groups compare what their ranks have staged, and what they learnt from the other group, so
// that all ranks commit or none. Returns what keeps this rank from it: its own failure, or what it
// hears of the others.
std::exception_ptr agree_to_commit(CommitOffer mine, const RefitRanks& ranks) {
  std::exception_ptr failure = std::move(mine.failure);
  const auto compare = [&](const std::vector<AgreedValue>& values, Communicator* communicator) {
    if (communicator == nullptr) return;
    try {
      compare_values(values, *communicator, kCommitPhase);
    } catch (const CommError&) {
      if (!failure) failure = std::current_exception();
    }
  };
  const auto others = [&] {
    return AgreedValue{"whether ranks of the other group agree", failure ? 0 : 1};
  };
  std::vector<AgreedValue> asked = {
      {"whether the refit goes on", static_cast<int64_t>(mine.intent)},
      {"whether all is staged", failure ? 0 : 1},
      {"the epoch", static_cast<int64_t>(mine.epoch)},
      {"the scope", mine.scope}};
  compare(asked, ranks.tensor);
  asked.push_back(others());
  compare(asked, ranks.experts);
  compare({others()}, ranks.tensor);
  return failure;
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

}  // namespace

RefitRanks refit_ranks_of(const PlanBase& plan, Communicator* communicator) noexcept {
  return {.tensor = plan.part.reduces() ? plan.part.tensor_communicator : nullptr,
          .experts = exchanges_tokens(plan) ? communicator : nullptr};
}

void withdraw_from_refit(const RefitRanks& ranks) noexcept {
  try {
    agree_to_commit({.intent = Intent::kWithdraw, .failure = withdrawn()}, ranks);
  } catch (const std::exception&) {
    return;  // there was no memory to tell them: the others' commit ends with its deadline
  }
}

LayerRefit::LayerRefit(RefittedLayer layer, const RefitOptions& options)
    : layer_(std::move(layer)),
      mode_(options.mode),
      epoch_(0),
      executor_(options.executor),
      scope_(units_of(layer_.engine.plan().spec, options.scope)),
      staged_(layer_.engine.plan().spec.num_experts) {
  if (const Support support = layer_.engine.refits(); !support) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "the weights of this layer are not refitted", .hint = support.reason()});
  }
  layer_.epochs.check_at_rest();
  claim_.emplace(layer_.epochs, Claimant::kRefit);
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
      .intent = Intent::kCommit, .epoch = epoch_, .scope = scope_.key(), .failure = failure()};
  if (const auto reason = agree_to_commit(mine, ranks())) std::rethrow_exception(reason);
  {
    const ForwardGate::Closed closed(layer_.gate);
    hand_over(&EngineRefit::publish);
    layer_.refit_epoch.store(epoch_, std::memory_order_release);
    layer_.weights_complete.store(true, std::memory_order_release);
  }
  hand_over(&EngineRefit::settle);
  rollback();
}

void LayerRefit::withdraw() noexcept {
  if (!claim_) return;
  withdraw_from_refit(ranks());
  rollback();
}

void LayerRefit::rollback() noexcept {
  engine_refit_.reset();
  claim_.reset();
}

}  // namespace conclave::inline v0
