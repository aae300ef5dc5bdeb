#include "layer/migration/move_rounds.h"

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
constexpr const char* kComparePhase = "migration: compare the hashes";
constexpr size_t kLeastPiece = size_t{4} << 10;
constexpr size_t kMostPiece = size_t{1} << 30;

// What a rank says of a wave: whether it failed, and the hash of each end of each move.
std::vector<uint64_t> report_of(bool failed, const MoveHashes& hashes) {
  std::vector<uint64_t> report = {failed ? uint64_t{1} : uint64_t{0}};
  report.insert(report.end(), hashes.sent.begin(), hashes.sent.end());
  report.insert(report.end(), hashes.received.begin(), hashes.received.end());
  return report;
}

// Reports of all ranks, in order.
class Reports {
 public:
  Reports(const std::vector<uint64_t>& mine, size_t num_moves, Communicator* communicator)
      : is_alone_(communicator == nullptr), num_moves_(num_moves), words_(mine.size()), all_(mine) {
    if (communicator == nullptr) return;
    all_.resize(mine.size() * static_cast<size_t>(communicator->size()));
    communicator->all_gather(std::as_bytes(std::span(mine)),
                             std::as_writable_bytes(std::span(all_)), kComparePhase);
  }

  bool is_alone() const { return is_alone_; }
  int32_t num_ranks() const { return static_cast<int32_t>(all_.size() / words_); }
  bool failed(int32_t rank) const { return at(rank, 0) != 0; }
  uint64_t sent(int32_t rank, size_t move) const { return at(rank, 1 + move); }
  uint64_t received(int32_t rank, size_t move) const { return at(rank, 1 + num_moves_ + move); }

 private:
  uint64_t at(int32_t rank, size_t word) const {
    return all_[(is_alone_ ? 0 : static_cast<size_t>(rank)) * words_ + word];
  }

  bool is_alone_;
  size_t num_moves_;
  size_t words_;
  std::vector<uint64_t> all_;
};

// Without peers, both ends of a move may be compared only where both are here.
void check_hashes(const Reports& reports, std::span<const ExpertMove> moves, int32_t rank) {
  for (int32_t other = 0; other < reports.num_ranks(); ++other) {
    if (!reports.failed(other)) continue;
    throw CommError(ErrorCode::kCommAborted, other, kComparePhase,
                    fmt::format("rank {} could not read an expert", other));
  }
  for (size_t i = 0; i < moves.size(); ++i) {
    const ExpertMove& move = moves[i];
    if (reports.is_alone() && (move.from_rank != rank || move.to_rank != rank)) continue;
    if (reports.sent(move.from_rank, i) == reports.received(move.to_rank, i)) continue;
    throw CommError(ErrorCode::kCommMismatch, rank == move.to_rank ? move.from_rank : move.to_rank,
                    kComparePhase,
                    fmt::format("the copy of expert {} on rank {} differs from the one on rank {}",
                                move.expert, move.to_rank, move.from_rank));
  }
}

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

std::vector<std::vector<ExpertMove>> waves_of(std::span<const ExpertMove> moves) {
  std::vector<std::vector<ExpertMove>> waves;
  std::vector<ExpertMove> left(moves.begin(), moves.end());
  while (!left.empty()) {
    std::vector<ExpertMove>& wave = waves.emplace_back();
    std::vector<ExpertMove> later;
    for (const ExpertMove& move : left) {
      const bool meets = std::ranges::any_of(wave, [&](const ExpertMove& other) {
        return move.from_rank == other.from_rank || move.from_rank == other.to_rank ||
               move.to_rank == other.from_rank || move.to_rank == other.to_rank;
      });
      (meets ? later : wave).push_back(move);
    }
    left = std::move(later);
  }
  return waves;
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
  MoveHashes hashes{.sent = std::vector<uint64_t>(moves.size(), 0),
                    .received = std::vector<uint64_t>(moves.size(), 0)};
  std::exception_ptr failure;
  try {
    hashes = move_slabs({.moves = moves,
                         .rank = rank_,
                         .memory = memory,
                         .communicator = communicator_,
                         .pack = pack,
                         .piece_bytes = options_.piece_bytes,
                         .pace = *pace_,
                         .stopped = stopped_});
  } catch (const CommError&) {
    throw;
  } catch (...) {
    // Peers learn of it below; they wait for this rank's report.
    failure = std::current_exception();
  }
  const Reports reports(report_of(failure != nullptr, hashes), moves.size(), communicator_);
  peers_know_ = true;
  if (failure) std::rethrow_exception(failure);
  check_hashes(reports, moves, rank_);
  peers_know_ = false;
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
  from_ = epoch_of_places(from_->number + 1, round.after);
  done_.fetch_add(1, std::memory_order_relaxed);
  return from_;
}

}  // namespace conclave::inline v0
