#include "layer/migration/move_wave.h"

#include "layer/migration/device_mover.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

namespace conclave::inline v0 {
namespace {

constexpr const char* kComparePhase = "migration: compare the hashes";

// A rank says of a wave whether it failed, and the hash of each end of each move.
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

std::string name_of(const ExpertMove& move) {
  if (move.expert < 0) return "what every rank has";
  return fmt::format("expert {}", move.expert);
}

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
                    fmt::format("the copy of {} on rank {} differs from the one on rank {}",
                                name_of(move), move.to_rank, move.from_rank));
  }
}

}  // namespace

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

void move_wave(const MoveCall& call, bool& peers_know) {
  peers_know = false;
  MoveHashes hashes{.sent = std::vector<uint64_t>(call.moves.size(), 0),
                    .received = std::vector<uint64_t>(call.moves.size(), 0)};
  std::exception_ptr failure;
  try {
    hashes = call.device != nullptr ? call.device->move(call) : move_slabs(call);
  } catch (const CommError&) {
    throw;
  } catch (...) {
    // Peers learn of it below; they wait for this rank's report.
    failure = std::current_exception();
  }
  const Reports reports(report_of(failure != nullptr, hashes), call.moves.size(),
                        call.communicator);
  peers_know = true;
  if (failure) std::rethrow_exception(failure);
  check_hashes(reports, call.moves, call.rank);
  peers_know = false;
}

}  // namespace conclave::inline v0
