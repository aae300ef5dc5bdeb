#include "layer/migration/move_rounds.h"

#include "layer/migration/device_mover.h"
#include "layer/migration/move_wave.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <exception>
#include <string>

namespace conclave::inline v0 {
namespace {

constexpr const char* kAgreePhase = "migration: agree on the slots";
constexpr size_t kLeastPiece = size_t{4} << 10;
constexpr size_t kMostPiece = size_t{1} << 30;

}  // namespace

void check_migration_options(const MigrationOptions& options) {
  if (!(options.processor_share > 0) || std::isinf(options.processor_share)) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "MigrationOptions.processor_share is out of range",
                 .tensor = "processor_share",
                 .found = std::to_string(options.processor_share),
                 .limit = "above 0"});
  }
  if (options.piece_bytes >= kLeastPiece && options.piece_bytes <= kMostPiece) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "MigrationOptions.piece_bytes is out of range",
               .tensor = "piece_bytes",
               .found = std::to_string(options.piece_bytes),
               .limit = fmt::format("{} to {}", kLeastPiece, kMostPiece)});
}

std::vector<AgreedValue> request_values(bool valid, const PlacementEpoch& from,
                                        const ExpertSlots& slots, const MovableExperts& experts,
                                        const MigrationOptions& options) {
  return {{"whether they can do as they were asked", valid ? 1 : 0},
          {"the placement epoch", static_cast<int64_t>(from.number)},
          {"where experts lie now", from.key},
          {"the slots", key_of(slots)},
          {"the packed layout", experts.layout_key},
          {"whether a source is read", options.source != nullptr ? 1 : 0},
          {"piece_bytes", static_cast<int64_t>(options.piece_bytes)}};
}

MoveRounds::MoveRounds(const RoundsRequest& request)
    : from_(request.from),
      slots_(request.slots),
      experts_(request.experts),
      options_(request.options),
      rank_(request.rank),
      communicator_(request.communicator),
      stopped_(request.stopped),
      rounds_(plan_moves(request.from->places, request.slots, request.with_temporary)),
      processor_share_(request.processor_share) {}

bool MoveRounds::needs_temporary() const {
  return from_->places.has_temporary || std::ranges::any_of(rounds_, [](const MoveRound& round) {
           return round.after.has_temporary;
         });
}

void MoveRounds::agree() const {
  if (communicator_ == nullptr) return;
  compare_values(request_values(true, *from_, slots_, experts_, options_), *communicator_,
                 kAgreePhase);
}

void MoveRounds::copy_wave(std::span<const ExpertMove> moves, const PlaceMemory& memory) {
  PackPlace pack;
  if (options_.source != nullptr) {
    pack = [this](int32_t expert, std::span<std::byte> gate_up, std::span<std::byte> down) {
      experts_.pack(*options_.source, expert, gate_up, down);
    };
  }
  move_wave({.moves = moves,
             .rank = rank_,
             .from = memory,
             .to = memory,
             .communicator = communicator_,
             .pack = pack,
             .piece_bytes = options_.piece_bytes,
             .pace = *pace_,
             .stopped = stopped_,
             .device = experts_.device.get(),
             .source = options_.source},
            peers_know_);
}

EpochPointer MoveRounds::copy_next() {
  if (!pace_) pace_.emplace(processor_share_);
  const MoveRound& round = rounds_[static_cast<size_t>(num_done())];
  const bool temporary = from_->places.has_temporary || round.after.has_temporary;
  const PlaceMemory memory = experts_.memory(temporary);
  for (const std::vector<ExpertMove>& wave : waves_of(round.moves)) {
    copy_wave(wave, memory);
    moved_.fetch_add(static_cast<int64_t>(wave.size()), std::memory_order_relaxed);
  }
  const EpochPointer next = epoch_of_places(from_->number + 1, round.after);
  if (experts_.device != nullptr) experts_.device->prepare(next);
  from_ = next;
  done_.fetch_add(1, std::memory_order_relaxed);
  return from_;
}

}  // namespace conclave::inline v0
