#include "layer/migration/update_placement.h"

#include "layer/agreed_values.h"
#include "layer/migration/device_mover.h"
#include "layer/migration/move_rounds.h"
#include "layer/rank_agreement.h"

#include <atomic>
#include <exception>
#include <optional>
#include <string>
#include <vector>

namespace conclave::inline v0 {
namespace {

constexpr const char* kPhase = "migration: agree on the slots";

class Update {
 public:
  explicit Update(const UpdateRequest& request)
      : request_(request), communicator_(communicator_of(request)) {}

  void run() {
    const std::exception_ptr refusal = prepare();
    agree_on_request(refusal);
    while (!rounds_->is_done()) run_round();
  }
  Update(const Update&) = delete;
  Update& operator=(const Update&) = delete;
  ~Update() {
    // A temporary place goes once no expert lies there.
    const bool is_empty = request_.epochs.current()->places.is_addressable();
    if (claim_ && is_empty) static_cast<void>(request_.experts.memory(false));
    if (request_.experts.device != nullptr) request_.experts.device->close();
  }

 private:
  bool is_full() const { return request_.plan.parallel.reduce == Reduce::kFull; }

  // Ranks whose caller adds up share no communicator of the layer.
  static Communicator* communicator_of(const UpdateRequest& request) {
    if (request.options.communicator != nullptr) return request.options.communicator;
    return exchanges_tokens(request.plan) ? request.communicator : nullptr;
  }

  void check_request() const {
    check_migration_options(request_.options);
    if (!request_.movable) {
      throw Error(ErrorCode::kUnsupported, {.what = "the experts of this layer do not move",
                                            .found = request_.movable.reason()});
    }
    const bool is_split = request_.plan.parallel.ep_size > 1;
    if (is_split && communicator_ == nullptr && request_.options.source == nullptr) {
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "experts of other ranks come over a communicator or from a source",
                   .tensor = "MigrationOptions",
                   .found = "neither"});
    }
  }

  // An error of this rank is thrown only after its peers have learnt of it.
  std::exception_ptr prepare() {
    if (communicator_ != nullptr) {
      check_migration_communicator(*communicator_, request_.plan.parallel);
    }
    if (request_.refusal) return request_.refusal;
    try {
      check_request();
      claim_.emplace(request_.epochs);
      if (request_.experts.device != nullptr) request_.experts.device->open();
      rounds_.emplace(RoundsRequest{.from = request_.epochs.current(),
                                    .slots = request_.slots,
                                    .experts = request_.experts,
                                    .options = request_.options,
                                    .rank = request_.plan.parallel.ep_rank,
                                    .communicator = communicator_,
                                    .with_temporary = true,
                                    .stopped = stopped_});
      // While peers can still be told that there is no memory for it.
      if (rounds_->needs_temporary()) static_cast<void>(request_.experts.memory(true));
    } catch (const Error&) {
      return std::current_exception();
    }
    return nullptr;
  }

  // A group compares what its ranks were asked, and what they learnt from the other group, so that
  // all ranks of both go on or none.
  void agree_on_request(const std::exception_ptr& refusal) const {
    std::exception_ptr failure = refusal;
    const auto compare = [&](const std::vector<AgreedValue>& mine, Communicator* communicator) {
      if (communicator == nullptr) return;
      try {
        compare_values(mine, *communicator, kPhase);
      } catch (const CommError&) {
        if (!failure) failure = std::current_exception();
      }
    };
    const auto others = [&] {
      return AgreedValue{"whether ranks of the other group agree", failure ? 0 : 1};
    };
    Communicator* const tensor = request_.plan.part.tensor_communicator;
    std::vector<AgreedValue> asked = request_values(
        !refusal, *request_.epochs.current(), request_.slots, request_.experts, request_.options);
    compare(asked, tensor);
    asked.push_back(others());
    compare(asked, communicator_);
    compare({others()}, tensor);
    if (failure) std::rethrow_exception(failure);
  }

  // All ranks take the round's epoch up, or none: those of other slices may have failed.
  uint64_t agree_on_epoch(const EpochOffer& offer) const {
    if (!is_full()) return offer.ready();
    return agree_on_call({.adapters = request_.adapters}, offer, request_.plan,
                         request_.communicator)
        .epoch;
  }

  void run_round() {
    EpochOffer offer{.current = request_.epochs.current(), .next = nullptr};
    std::exception_ptr failure;
    try {
      offer.next = rounds_->copy_next();
    } catch (const std::exception& error) {
      if (!rounds_->peers_know()) {
        give_up(request_.plan, request_.communicator, error.what());
        throw;
      }
      failure = std::current_exception();
    }
    const uint64_t agreed = agree_on_epoch(offer);
    if (failure) std::rethrow_exception(failure);
    if (agreed != offer.next->number) {
      throw CommError(ErrorCode::kCommAborted, -1, kPhase, "ranks of another slice failed");
    }
    if (request_.experts.device != nullptr) request_.experts.device->enter(offer.next);
    request_.epochs.take(offer, agreed);
  }

  const UpdateRequest& request_;
  Communicator* communicator_;
  const std::atomic<bool> stopped_{false};
  std::optional<EpochClaim> claim_;
  std::optional<MoveRounds> rounds_;
};

}  // namespace

void check_migration_communicator(const Communicator& communicator, const ParallelSpec& parallel) {
  if (communicator.size() == parallel.ep_size && communicator.rank() == parallel.ep_rank) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "the communicator of a migration joins the expert-parallel ranks",
               .tensor = "communicator",
               .expected = "rank " + std::to_string(parallel.ep_rank) + " of " +
                           std::to_string(parallel.ep_size),
               .found = "rank " + std::to_string(communicator.rank()) + " of " +
                        std::to_string(communicator.size())});
}

void update_placement(const UpdateRequest& request) { Update(request).run(); }

}  // namespace conclave::inline v0
