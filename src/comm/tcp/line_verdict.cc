#include "comm/tcp/line_verdict.h"

#include <algorithm>
#include <chrono>
#include <unistd.h>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

using std::chrono_literals::operator""ms;
using Clock = std::chrono::steady_clock;

// Ranks begin their ballots one after the other, lower ones first, so that one is mostly enough.
constexpr auto kTurn = 50ms;
constexpr int64_t kMostTurns = 6;

class LineVerdict final : public Verdict {
 public:
  LineVerdict(std::shared_ptr<Lines> lines, uint64_t epoch, const std::vector<int32_t>& members,
              int32_t me)
      : lines_(std::move(lines)),
        epoch_(epoch),
        members_(members),
        me_(me),
        ballots_(me, static_cast<int32_t>(members.size())),
        came_(members.size(), 0),
        gone_(members.size(), 0),
        luck_(static_cast<uint32_t>(me) + 1) {}
  LineVerdict(const LineVerdict&) = delete;
  LineVerdict& operator=(const LineVerdict&) = delete;
  // Those that call the roll later need not wait for this rank.
  ~LineVerdict() override {
    if (!lines_->is_inherited()) send({.epoch = epoch_, .is_gone = true});
  }

  void come() override { write(); }
  std::optional<Present> read() override {
    listen();
    return ballots_.settled();
  }
  std::optional<Present> settle(const Present& mine) override;

  void look(RollCall& roll) override {
    for (int32_t rank = 0; rank < size(); ++rank) {
      if (came_[at(rank)] != 0) roll.has_come(rank);
      if (has_left(rank)) roll.has_ended(rank);
    }
  }
  bool has_ended(int32_t rank) override { return has_left(rank); }
  int32_t awaited() const override {
    for (int32_t rank = 0; rank < size(); ++rank) {
      if (!is_confirmed(rank)) return rank;
    }
    return -1;
  }

 private:
  enum class State : uint8_t { kNew, kRests, kWrites };

  static size_t at(int32_t rank) { return static_cast<size_t>(rank); }
  int32_t size() const { return static_cast<int32_t>(members_.size()); }
  Line& line(int32_t rank) const { return lines_->at(members_[at(rank)]); }
  bool has_left(int32_t rank) const { return gone_[at(rank)] != 0 || line(rank).has_ended(); }
  bool is_confirmed(int32_t rank) const { return has_left(rank) || line(rank).is_confirmed(); }

  void send(const LineMessage& message) {
    for (int32_t rank = 0; rank < size(); ++rank) {
      if (rank != me_) line(rank).send(message);
    }
  }
  void write() { send({.epoch = epoch_, .cell = ballots_.cell()}); }

  void listen() {
    for (int32_t rank = 0; rank < size(); ++rank) {
      if (rank == me_) continue;
      line(rank).move();
      while (const auto message = line(rank).take(epoch_)) {
        if (message->is_gone) {
          gone_[at(rank)] = 1;
          continue;
        }
        came_[at(rank)] = 1;
        ballots_.hear(rank, message->cell);
      }
    }
  }

  void rest_until_turn(const Present& mine) {
    const auto before = std::count(mine.begin(), mine.begin() + me_, uint8_t{1});
    turn_ = Clock::now() + kTurn * std::min<int64_t>(before, kMostTurns);
    state_ = State::kRests;
  }
  // For other times than those of the rank whose ballot was in the way.
  void rest_by_chance() {
    luck_ = luck_ * 1664525U + 1013904223U;
    turn_ = Clock::now() + kTurn * (luck_ >> 24U) / 256;
    state_ = State::kRests;
  }

  std::shared_ptr<Lines> lines_;
  uint64_t epoch_;
  std::vector<int32_t> members_;
  int32_t me_;
  Ballots ballots_;
  std::vector<uint8_t> came_;
  std::vector<uint8_t> gone_;
  State state_ = State::kNew;
  Clock::time_point turn_;
  uint32_t luck_;
};

std::optional<Present> LineVerdict::settle(const Present& mine) {
  listen();
  if (ballots_.settled()) return ballots_.settled();
  if (state_ == State::kNew) rest_until_turn(mine);
  if (state_ == State::kRests) {
    if (Clock::now() < turn_) return std::nullopt;
    ballots_.begin(mine);
    write();
    state_ = State::kWrites;
  }
  while (awaited() < 0) {
    // Words that lay here when the last cell had come everywhere count: they are heard only now.
    listen();
    switch (ballots_.is_written()) {
      case Ballots::Outcome::kWrite:
        write();
        continue;
      case Ballots::Outcome::kLost:
        rest_by_chance();
        return std::nullopt;
      case Ballots::Outcome::kSettled:
        write();
        return ballots_.settled();
    }
  }
  return std::nullopt;
}

}  // namespace

Lines::Lines(std::vector<Line> lines) : lines_(std::move(lines)), pid_(::getpid()) {}

bool Lines::is_inherited() const noexcept { return pid_ != ::getpid(); }

Lines::~Lines() {
  if (is_inherited()) return;
  for (Line& line : lines_) line.shut();
}

std::unique_ptr<Verdict> Lines::verdict(uint64_t epoch, const std::vector<int32_t>& members,
                                        int32_t me) {
  return std::make_unique<LineVerdict>(shared_from_this(), epoch, members, me);
}

}  // namespace conclave::inline v0::comm
