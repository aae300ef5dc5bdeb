// Roll calls in a simulated world: messages are late, ranks come late or never, stop and go on, and
// die between any two steps. Whatever happens there is one answer.
#include "comm/survivors.h"
#include "support/in_sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace conclave::comm {
namespace {

constexpr int kDeadline = 40;  // in steps of a rank
constexpr int kMostDelay = 12;

// A word that is written once. A world without it shows what it is for.
struct Register {
  bool is_written_once = true;
  std::vector<Present> proposals;
  int32_t first = -1;

  std::optional<Present> read() const {
    if (first < 0) return std::nullopt;
    return proposals[static_cast<size_t>(first)];
  }
  void write(int32_t rank) {
    if (first < 0 || !is_written_once) first = rank;
  }
};

enum class State : uint8_t { kAway, kWaits, kProposes, kWrites, kReads, kEnded };

struct SimulatedRank {
  State state = State::kAway;
  int comes_at = 0;
  int dies_at = INT32_MAX;
  int stops_at = INT32_MAX;
  int goes_on_at = INT32_MAX;
  int came_at = -1;
  int ended_at = -1;
  std::vector<int> heard_at;  // [ranks] when this rank hears that the other has come
  std::optional<Present> answer;

  bool acts(int now) const {
    const bool stopped = now >= stops_at && now < goes_on_at;
    return now < dies_at && !stopped && state != State::kEnded;
  }
};

class World {
 public:
  World(uint32_t seed, bool is_written_once) : random_(seed) {
    ranks_.resize(2 + random_() % 5);
    register_.is_written_once = is_written_once;
    register_.proposals.resize(ranks_.size());
    for (SimulatedRank& rank : ranks_) {
      rank.heard_at.assign(ranks_.size(), INT32_MAX);
      rank.comes_at = below(5) == 0 ? below(3 * kDeadline) : below(kDeadline / 2);
      if (below(4) == 0) rank.dies_at = below(2 * kDeadline);
      if (below(4) == 0) {
        rank.stops_at = below(2 * kDeadline);
        rank.goes_on_at = rank.stops_at + below(3 * kDeadline);
      }
    }
  }

  void run() {
    for (int now = 0; now < 8 * kDeadline && !is_over(now); ++now) {
      // Ranks take turns in another order each time, and some take several steps in one.
      std::vector<int32_t> order(ranks_.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
      std::ranges::shuffle(order, random_);
      for (const int32_t rank : order) {
        for (int step = below(3); step >= 0; --step) {
          if (ranks_[static_cast<size_t>(rank)].acts(now)) take_step(rank, now);
        }
      }
    }
  }

  const std::vector<SimulatedRank>& ranks() const { return ranks_; }

 private:
  bool is_over(int now) const {
    return std::ranges::all_of(ranks_, [now](const SimulatedRank& rank) {
      return rank.state == State::kEnded || now >= rank.dies_at;
    });
  }
  int below(int limit) { return static_cast<int>(random_() % static_cast<uint32_t>(limit)); }

  void take_step(int32_t number, int now) {
    SimulatedRank& self = ranks_[static_cast<size_t>(number)];
    switch (self.state) {
      case State::kAway:
        if (now < self.comes_at) return;
        self.came_at = now;
        for (SimulatedRank& other : ranks_) {
          other.heard_at[static_cast<size_t>(number)] = now + below(kMostDelay);
        }
        self.state = State::kWaits;
        return;
      case State::kWaits:
        wait(number, now);
        return;
      case State::kProposes:
        // A part of it may be written when a rank dies: nobody reads it then.
        register_.proposals[static_cast<size_t>(number)] = prepared_[number];
        self.state = State::kWrites;
        return;
      case State::kWrites:
        register_.write(number);
        self.state = State::kReads;
        return;
      case State::kReads:
        self.answer = register_.read();
        self.ended_at = now;
        self.state = State::kEnded;
        return;
      case State::kEnded:
        return;
    }
  }

  void wait(int32_t number, int now) {
    SimulatedRank& self = ranks_[static_cast<size_t>(number)];
    if (register_.read()) {
      self.state = State::kReads;
      return;
    }
    RollCall roll(number, static_cast<int32_t>(ranks_.size()));
    for (size_t other = 0; other < ranks_.size(); ++other) {
      if (self.heard_at[other] <= now) roll.has_come(static_cast<int32_t>(other));
      if (now - 3 >= ranks_[other].dies_at) roll.has_ended(static_cast<int32_t>(other));
    }
    if (!roll.is_over() && now < self.came_at + kDeadline) return;
    prepared_[number] = roll.proposal();
    self.state = State::kProposes;
  }

  std::mt19937 random_;
  std::vector<SimulatedRank> ranks_;
  Register register_;
  Present prepared_[6];
};

// Every answer of a world.
std::vector<Present> answers_of(const World& world) {
  std::vector<Present> answers;
  for (const SimulatedRank& rank : world.ranks()) {
    if (rank.answer && std::ranges::find(answers, *rank.answer) == answers.end()) {
      answers.push_back(*rank.answer);
    }
  }
  return answers;
}

void expect_promises(const World& world) {
  const std::vector<Present> answers = answers_of(world);
  ASSERT_LE(answers.size(), 1U) << "two groups go on";
  int last_timely = INT32_MAX;
  for (const SimulatedRank& rank : world.ranks()) {
    if (rank.came_at >= 0) last_timely = std::min(last_timely, rank.came_at + kDeadline);
  }
  for (size_t number = 0; number < world.ranks().size(); ++number) {
    SCOPED_TRACE("rank " + std::to_string(number));
    const SimulatedRank& rank = world.ranks()[number];
    const bool is_healthy = rank.dies_at == INT32_MAX && rank.stops_at == INT32_MAX;
    if (!is_healthy) continue;
    ASSERT_EQ(rank.state, State::kEnded) << "it waits for ever";
    EXPECT_LE(rank.ended_at, rank.came_at + kDeadline + 4) << "it waits beyond its deadline";
    ASSERT_TRUE(rank.answer);
    // One that came, and was heard of, before anybody's deadline is in.
    if (rank.came_at + kMostDelay < last_timely) {
      EXPECT_EQ(answers[0][number], 1) << "it was there in time";
    }
    for (size_t other = 0; other < world.ranks().size(); ++other) {
      if (answers[0][other] == 0) continue;
      EXPECT_GE(world.ranks()[other].came_at, 0) << "a rank that never came goes on";
    }
  }
}

TEST(RollCall, AHundredThousandSchedules_HaveOneAnswerEach) {
  int left_out = 0, tried = 0;
  for (uint32_t seed = 0; seed < 100'000; ++seed) {
    if (!testing::in_sample(seed, 10)) continue;
    ++tried;
    World world(seed, true);
    world.run();
    expect_promises(world);
    if (HasFatalFailure() || HasNonfatalFailure()) {
      FAIL() << "seed " << seed;
    }
    for (const Present& answer : answers_of(world)) {
      left_out += static_cast<int>(std::ranges::count(answer, 0));
    }
  }
  EXPECT_GT(left_out, tried / 100) << "the schedules plant no faults";
}

// The simulation finds what it looks for: without a word that is written once there are two.
TEST(RollCall, WordThatIsWrittenTwice_SplitsThem) {
  int split = 0;
  for (uint32_t seed = 0; seed < 20'000; ++seed) {
    if (!testing::in_sample(seed, 10)) continue;
    World world(seed, false);
    world.run();
    if (answers_of(world).size() > 1) ++split;
  }
  EXPECT_GT(split, 0);
}

}  // namespace
}  // namespace conclave::comm
