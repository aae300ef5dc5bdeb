#include "layer/migration/migration_worker.h"

#include "cpu/fork_count.h"
#include "layer/migration/device_mover.h"
#include "layer/migration/update_placement.h"
#include "layer/rank_agreement.h"

#include "conclave/error.h"

#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr const char* kFinishPhase = "migration: finish";

Communicator& communicator_of(const MigrationOptions& options) {
  if (options.communicator != nullptr) return *options.communicator;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "a migration beside forwards needs a communicator of its own",
               .tensor = "communicator"});
}

// Throws what the layer or the options rule out.
void check_request(const MigratingLayer& layer, const MigrationOptions& options) {
  check_migration_options(options);
  check_migration_communicator(*options.communicator, layer.plan.parallel);
  const auto refuse = [](std::string why) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "the experts of this layer do not move", .found = std::move(why)});
  };
  if (!layer.movable) refuse(layer.movable.reason());
  if (layer.plan.parallel.reduce == Reduce::kPartial) {
    refuse(
        "ranks whose caller adds up agree on nothing in a forward (Reduce::kPartial): "
        "update_placement is there");
  }
}

}  // namespace

MigrationWorker::MigrationWorker(MigratingLayer layer, const ExpertSlots& slots,
                                 const MigrationOptions& options)
    : layer_(std::move(layer)),
      communicator_(communicator_of(options)),
      fork_count_(cpu::fork_count()) {
  check_request(layer_, options);
  const EpochPointer from = layer_.epochs.offer().current;
  first_epoch_ = from->number;
  rounds_.emplace(RoundsRequest{.from = from,
                                .slots = slots,
                                .experts = layer_.experts,
                                .options = options,
                                .rank = layer_.plan.parallel.ep_rank,
                                .communicator = &communicator_,
                                .processor_share = options.processor_share,
                                .stopped = stopped_});
  layer_.epochs.claim();
  try {
    if (layer_.experts.device != nullptr) layer_.experts.device->open();
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    if (layer_.experts.device != nullptr) layer_.experts.device->close();
    layer_.epochs.release();
    throw;
  }
}

MigrationWorker::~MigrationWorker() {
  if (cpu::fork_count() != fork_count_) {
    // In a forked child there is no such thread, and its locks may be held for ever.
    thread_.detach();
    return;
  }
  stopped_.store(true, std::memory_order_release);
  layer_.epochs.wake();
  {
    const std::lock_guard lock(mutex_);
    // A message that it waits for may never come, nor one that peers wait for.
    const bool all_know = state_ == State::kFailed && rounds_->peers_know();
    if (!is_complete() && !all_know) communicator_.abort("a rank ended the migration");
  }
  thread_.join();
  if (layer_.experts.device != nullptr) layer_.experts.device->close();
  layer_.epochs.release();
}

void MigrationWorker::set(State state, std::exception_ptr failure) {
  {
    const std::lock_guard lock(mutex_);
    state_ = state;
    failure_ = std::move(failure);
  }
  changed_.notify_all();
}

void MigrationWorker::copy_rounds() {
  rounds_->agree();
  while (!rounds_->is_done()) {
    const EpochPointer next = rounds_->copy_next();
    layer_.epochs.prepare(next);
    set(State::kReady);
    // Until all ranks are in the new epoch the places that it frees are read.
    layer_.epochs.await_taken(next->number, [this] { return stopped_.load(); });
    if (stopped_) return;
    set(State::kCopying);
  }
  set(State::kDone);
}

void MigrationWorker::run() noexcept {
  yield_to_others();
  try {
    copy_rounds();
  } catch (...) {
    set(State::kFailed, std::current_exception());
  }
}

bool MigrationWorker::is_taken() const {
  return layer_.epochs.current()->number >=
         first_epoch_ + static_cast<uint64_t>(rounds_->num_done());
}

bool MigrationWorker::is_complete() const {
  if (state_ == State::kDone) return true;
  return rounds_->size() > 0 && rounds_->is_done() && is_taken();
}

MigrationStatus MigrationWorker::status() const {
  const std::lock_guard lock(mutex_);
  const int64_t waiting = is_taken() ? 0 : 1;
  return {.is_done = is_complete(),
          .has_failed = state_ == State::kFailed,
          .rounds = rounds_->size(),
          .rounds_done = rounds_->num_done() - waiting,
          .experts_moved = rounds_->experts_moved()};
}

void MigrationWorker::check() const {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void MigrationWorker::await_step() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] {
    return state_ == State::kDone || state_ == State::kFailed ||
           (state_ == State::kReady && !is_taken()) || is_complete();
  });
}

// Each rank waits for its own worker, then all compare what they have, once a round and once more:
// so all of them end together, whichever of them failed.
void MigrationWorker::finish() {
  while (true) {
    await_step();
    const EpochOffer offer = layer_.epochs.offer();
    DeviceMover* const device = offer.next != nullptr ? layer_.experts.device.get() : nullptr;
    if (device != nullptr) device->await_device();
    const uint64_t agreed =
        agree_on_call({.adapters = layer_.adapters}, offer, layer_.plan, layer_.communicator).epoch;
    if (agreed != offer.current->number) {
      if (device != nullptr) device->enter(offer.next);
      layer_.epochs.take(offer, agreed);
      continue;
    }
    check();
    if (status().is_done) return;
    throw CommError(ErrorCode::kCommAborted, -1, kFinishPhase,
                    "the migration failed on another rank");
  }
}

}  // namespace conclave::inline v0
