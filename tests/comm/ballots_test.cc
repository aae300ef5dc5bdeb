// A word that is written once by ranks that share no memory, in a simulated world: cells are on
// their way for some time, ranks take turns in any order, stop for long and go on, and die between
// any two steps, also between two sends of one cell.
#include "comm/message/ballots.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace conclave::comm {
namespace {

constexpr int kMostDelay = 12;

enum class State : uint8_t { kRests, kSends, kAwaitsWrite, kHears, kDone };

struct OnItsWay {
  int arrives_at = 0;
  WordCell cell;
};

struct SimulatedRank {
  explicit SimulatedRank(int32_t me, int32_t ranks)
      : ballots(me, ranks), from(static_cast<size_t>(ranks)) {}

  Ballots ballots;
  State state = State::kRests;
  int begins_at = 0;
  int dies_at = INT32_MAX;
  int stops_at = INT32_MAX;
  int goes_on_at = INT32_MAX;
  int32_t next_to = 0;  // whom a cell that is being sent goes to next
  int written_at = 0;   // when it lies with all others
  int done_at = INT32_MAX;
  std::vector<std::deque<OnItsWay>> from;  // [ranks] what others have sent, in order
  std::optional<Present> answer;
};

class World {
 public:
  // `confirms`: ranks wait until their cells lie with the others.
  World(uint32_t seed, bool confirms) : random_(seed), confirms_(confirms) {
    const int32_t ranks = 2 + below(4);
    for (int32_t rank = 0; rank < ranks; ++rank) {
      SimulatedRank& one = ranks_.emplace_back(rank, ranks);
      one.begins_at = below(30);
      if (below(4) == 0) one.dies_at = below(150);
      if (below(3) == 0) {
        one.stops_at = below(100);
        one.goes_on_at = one.stops_at + below(400);
      }
    }
  }

  void run() {
    for (int now = 0; now < 2000 && !is_over(now); ++now) {
      std::vector<int32_t> order(ranks_.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
      std::ranges::shuffle(order, random_);
      for (const int32_t rank : order) {
        for (int step = below(3); step >= 0; --step) {
          if (acts(rank, now)) take_step(rank, now);
        }
      }
    }
  }

  const std::vector<SimulatedRank>& ranks() const { return ranks_; }

 private:
  int below(int limit) { return static_cast<int>(random_() % static_cast<uint32_t>(limit)); }
  bool is_over(int now) const {
    return std::ranges::all_of(ranks_, [now](const SimulatedRank& rank) {
      return rank.state == State::kDone || now >= rank.dies_at;
    });
  }
  bool acts(int32_t rank, int now) const {
    const SimulatedRank& one = ranks_[static_cast<size_t>(rank)];
    const bool stopped = now >= one.stops_at && now < one.goes_on_at;
    return now < one.dies_at && !stopped && one.state != State::kDone;
  }

  void hear_all(int32_t me, int now) {
    SimulatedRank& self = ranks_[static_cast<size_t>(me)];
    for (size_t from = 0; from < self.from.size(); ++from) {
      std::deque<OnItsWay>& queue = self.from[from];
      while (!queue.empty() && queue.front().arrives_at <= now) {
        self.ballots.hear(static_cast<int32_t>(from), queue.front().cell);
        queue.pop_front();
      }
    }
  }

  void send(int32_t me, int now) {
    SimulatedRank& self = ranks_[static_cast<size_t>(me)];
    const auto ranks = static_cast<int32_t>(ranks_.size());
    if (self.next_to == me) ++self.next_to;
    if (self.next_to < ranks) {
      std::deque<OnItsWay>& queue =
          ranks_[static_cast<size_t>(self.next_to)].from[static_cast<size_t>(me)];
      const int earliest = queue.empty() ? now : queue.back().arrives_at;
      const int arrives = std::max(earliest, now + below(kMostDelay));
      queue.push_back({.arrives_at = arrives, .cell = self.ballots.cell()});
      self.written_at = std::max(self.written_at, arrives);
      ++self.next_to;
      return;
    }
    self.state = self.ballots.settled() ? State::kDone : State::kAwaitsWrite;
  }

  void take_step(int32_t me, int now) {
    SimulatedRank& self = ranks_[static_cast<size_t>(me)];
    switch (self.state) {
      case State::kRests:
        hear_all(me, now);
        if (finish(self, now)) return;
        if (now < self.begins_at) return;
        self.ballots.begin(proposal_of(me));
        return start_sending(self);
      case State::kSends:
        return send(me, now);
      case State::kAwaitsWrite:
        if (now >= self.written_at || !confirms_) self.state = State::kHears;
        return;
      case State::kHears:
        hear_all(me, now);
        switch (self.ballots.is_written()) {
          case Ballots::Outcome::kWrite:
            return start_sending(self);
          case Ballots::Outcome::kLost:
            self.state = State::kRests;
            self.begins_at = now + below(60);
            return;
          case Ballots::Outcome::kSettled:
            finish(self, now);
            // It tells the others, and may die before all have heard.
            return start_sending(self);
        }
        return;
      case State::kDone:
        return;
    }
  }

  bool finish(SimulatedRank& self, int now) {
    if (!self.ballots.settled()) return false;
    self.answer = self.ballots.settled();
    self.done_at = std::min(self.done_at, now);
    self.state = State::kDone;
    return true;
  }
  static void start_sending(SimulatedRank& self) {
    self.next_to = 0;
    self.state = State::kSends;
  }
  // Others for each rank, so that two answers would differ.
  Present proposal_of(int32_t me) const {
    Present mine(ranks_.size(), 0);
    mine[static_cast<size_t>(me)] = 1;
    return mine;
  }

  std::mt19937 random_;
  bool confirms_;
  std::vector<SimulatedRank> ranks_;
};

size_t answers_of(const World& world) {
  std::vector<Present> answers;
  for (const SimulatedRank& rank : world.ranks()) {
    if (rank.answer && std::ranges::find(answers, *rank.answer) == answers.end()) {
      answers.push_back(*rank.answer);
    }
  }
  return answers.size();
}

TEST(Ballots, FiveThousandSchedules_HaveOneAnswerEach) {
  int with_faults = 0;
  int stopped_ranks_told = 0;
  for (uint32_t seed = 0; seed < 5'000; ++seed) {
    World world(seed, true);
    world.run();
    ASSERT_LE(answers_of(world), 1U) << "two groups go on, seed " << seed;
    for (const SimulatedRank& rank : world.ranks()) {
      if (rank.dies_at != INT32_MAX) {
        ++with_faults;
        continue;
      }
      ASSERT_TRUE(rank.answer) << "a rank has no answer, seed " << seed;
      if (rank.stops_at != INT32_MAX) {
        ++stopped_ranks_told;
        continue;
      }
      ASSERT_LE(rank.done_at, 1200) << "a rank waits for one that is silent, seed " << seed;
    }
  }
  EXPECT_GT(with_faults, 1000) << "the schedules plant no faults";
  EXPECT_GT(stopped_ranks_told, 500);
}

// The simulation finds what it looks for.
TEST(Ballots, RanksThatDoNotAwaitTheirWrites_Split) {
  int split = 0;
  for (uint32_t seed = 0; seed < 2'000; ++seed) {
    World world(seed, false);
    world.run();
    if (answers_of(world) > 1) ++split;
  }
  EXPECT_GT(split, 0);
}

TEST(Ballots, LaterRank_SettlesWhatOneHasAcceptedBeforeItDied) {
  Ballots first(0, 2);
  Ballots second(1, 2);
  first.begin({1, 0});
  second.hear(0, first.cell());
  ASSERT_EQ(first.is_written(), Ballots::Outcome::kWrite);
  second.hear(0, first.cell());  // then it dies, or has settled it: nobody can tell
  second.begin({0, 1});
  ASSERT_EQ(second.is_written(), Ballots::Outcome::kWrite);
  ASSERT_EQ(second.is_written(), Ballots::Outcome::kSettled);
  EXPECT_EQ(*second.settled(), (Present{1, 0}));
}

TEST(Ballots, OvertakenRank_BeginsAgainAbove) {
  Ballots first(0, 2);
  Ballots second(1, 2);
  first.begin({1, 0});
  second.begin({0, 1});
  first.hear(1, second.cell());
  second.hear(0, first.cell());
  EXPECT_EQ(first.is_written(), Ballots::Outcome::kLost);
  EXPECT_EQ(second.is_written(), Ballots::Outcome::kWrite);
  first.begin({1, 0});
  EXPECT_GT(first.cell().promised, second.cell().promised);
}

}  // namespace
}  // namespace conclave::comm
