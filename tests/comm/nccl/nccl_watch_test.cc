// The watch of a rank: who is late, gone or of another mind, from marks that a test writes in the
// place of a device. Needs neither a GPU nor NCCL.
#include "comm/nccl/nccl_watch.h"

#include "support/thread_groups.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using comm::ClaimPair;
using comm::DeviceClaim;
using comm::kGraphCell;
using comm::Marks;
using comm::NcclGroup;
using comm::NcclWatch;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using Clock = std::chrono::steady_clock;

struct Rank {
  NcclGroup group{0};
  Marks marks{};
  std::optional<ClaimPair> claims;
  std::string host_ended_by;
  std::atomic<bool> waits_stopped = false;
  std::unique_ptr<NcclWatch> watch;
};

// Ranks of one process, each with its watch.
std::vector<std::unique_ptr<Rank>> make_ranks(int32_t count) {
  auto peers = testing::make_tcp_group({.num_ranks = count, .timeout = 10s});
  std::vector<std::unique_ptr<Rank>> ranks;
  for (auto& peer : peers) {
    auto rank = std::make_unique<Rank>();
    Rank* const own = rank.get();
    rank->watch = std::make_unique<NcclWatch>(
        NcclWatch::Parts{.peers = std::move(peer),
                         .group = rank->group,
                         .marks = rank->marks,
                         .end_host = [own](const std::string& why) { own->host_ended_by = why; },
                         .find_disagreement = [own] { return own->claims; },
                         .stop_waits = [own] { own->waits_stopped = true; }});
    ranks.push_back(std::move(rank));
  }
  return ranks;
}

// As the device does when the turn of a collective comes.
void begin(Rank& rank, int32_t cell = 0) {
  ++rank.marks.begun[static_cast<size_t>(cell)];
  ++rank.marks.collectives;
}

void expect_failure(const Rank& rank, ErrorCode code, int32_t peer, const std::string& text) {
  const auto until = Clock::now() + 5s;
  while (!rank.watch->failed() && Clock::now() < until) std::this_thread::sleep_for(1ms);
  // Set behind the failure itself, by the same thread.
  while (!rank.waits_stopped && Clock::now() < until) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(rank.waits_stopped) << "kernels would wait on";
  try {
    rank.watch->check("step");
    ADD_FAILURE() << "no failure";
  } catch (const CommError& error) {
    EXPECT_EQ(to_string(error.code()), to_string(code)) << error.what();
    EXPECT_EQ(error.peer(), peer) << error.what();
    EXPECT_EQ(error.phase(), "step");
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(NcclWatch, TheRankThatIsBehind_IsLateOnEveryRank) {
  const auto ranks = make_ranks(3);
  begin(*ranks[0]);
  begin(*ranks[1]);
  ranks[0]->watch->follow({.number = 1, .deadline = 100ms});
  for (const auto& rank : ranks) {
    expect_failure(*rank, ErrorCode::kCommTimeout, 2, "within 100 ms");
    EXPECT_NE(rank->host_ended_by.find("rank 2"), std::string::npos);
  }
}

TEST(NcclWatch, ADeadline_CountsFromTheTurnAndEndsWithTheOperation) {
  const auto ranks = make_ranks(2);
  ranks[0]->watch->follow({.number = 1, .deadline = 50ms});
  std::this_thread::sleep_for(200ms);
  EXPECT_FALSE(ranks[0]->watch->failed()) << "its turn has not come";
  begin(*ranks[0]);
  ++ranks[0]->marks.ended[0];
  std::this_thread::sleep_for(200ms);
  EXPECT_FALSE(ranks[0]->watch->failed()) << "it is over";
  EXPECT_NO_THROW(ranks[0]->watch->check("step"));
}

TEST(NcclWatch, AGraphThatStandsStill_IsLate) {
  const auto ranks = make_ranks(2);
  ranks[0]->watch->follow_graphs(100ms, "step");
  for (int round = 0; round < 3; ++round) {
    begin(*ranks[0], kGraphCell);
    begin(*ranks[1], kGraphCell);
    ++ranks[0]->marks.ended[kGraphCell];
    std::this_thread::sleep_for(60ms);
  }
  EXPECT_FALSE(ranks[0]->watch->failed());
  begin(*ranks[0], kGraphCell);
  expect_failure(*ranks[0], ErrorCode::kCommTimeout, 1, "rank 1 did not come");
  expect_failure(*ranks[1], ErrorCode::kCommTimeout, 1, "rank 1 did not come");
}

TEST(NcclWatch, WhereAllHaveCome_TheirClaimsSayWhoDisagrees) {
  const auto ranks = make_ranks(3);
  const auto code = static_cast<uint32_t>(CommKind::kAllGather);
  for (const auto& rank : ranks) begin(*rank);
  ranks[1]->claims = ClaimPair{.mine = {.code = code, .peer = 2, .offered = 8, .expected = 8},
                               .theirs = {.code = code, .peer = 2, .offered = 4, .expected = 4}};
  ranks[0]->watch->find_culprit(-1, 100ms);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const int32_t other = rank == 2 ? 1 : 2;
    expect_failure(*ranks[rank], ErrorCode::kCommMismatch, other, "rank 2 offers 4 bytes");
  }
}

// A rank that hears of it before its own device does names the one that has told it.
TEST(NcclWatch, AMismatchOnTheDevice_FailsEveryRank_AndEachNamesTheOther) {
  const auto ranks = make_ranks(3);
  const auto code = static_cast<uint32_t>(CommKind::kAllGather);
  Marks& marks = ranks[0]->marks;
  marks.mine = {.code = code, .peer = 1, .offered = 8, .expected = 8};
  marks.theirs = {.code = code, .peer = 1, .offered = 4, .expected = 4};
  std::atomic_thread_fence(std::memory_order_release);
  marks.mismatches = 1;
  expect_failure(*ranks[0], ErrorCode::kCommMismatch, 1, "rank 1 offers 4 bytes");
  expect_failure(*ranks[1], ErrorCode::kCommMismatch, 0, "rank 1 offers 4 bytes");
  expect_failure(*ranks[2], ErrorCode::kCommMismatch, 1, "rank 1 offers 4 bytes");
}

// What lies there is of the operation before.
TEST(NcclWatch, ClaimsOfARankThatIsBehind_DoNotCount) {
  const auto ranks = make_ranks(2);
  begin(*ranks[0]);
  ranks[0]->claims = ClaimPair{.mine = {.peer = 1, .offered = 8}, .theirs = {.peer = 1}};
  ranks[0]->watch->find_culprit(-1, 100ms);
  for (const auto& rank : ranks) expect_failure(*rank, ErrorCode::kCommTimeout, 1, "within 100 ms");
}

TEST(NcclWatch, WhereNobodyIsBehind_TheDeviceIsToBlame) {
  const auto ranks = make_ranks(2);
  for (const auto& rank : ranks) begin(*rank);
  ranks[1]->watch->find_culprit(-1, 100ms);
  for (const auto& rank : ranks) {
    expect_failure(*rank, ErrorCode::kCommTimeout, -1, "all ranks came");
  }
}

TEST(NcclWatch, AFailureOfOne_IsToldToAll) {
  const auto ranks = make_ranks(3);
  ranks[1]->watch->fail(ErrorCode::kCommAborted, 1, "had enough");
  ranks[1]->watch->fail(ErrorCode::kCommTimeout, 0, "a later one");
  for (const auto& rank : ranks) {
    expect_failure(*rank, ErrorCode::kCommAborted, 1, "had enough");
  }
}

TEST(NcclWatch, ARankThatLeaves_IsSeenAndLostToLaterOperations) {
  const auto ranks = make_ranks(3);
  for (const auto& rank : ranks) {
    begin(*rank);
    ++rank->marks.ended[0];
  }
  const auto before = Clock::now();
  ranks[1]->watch.reset();
  EXPECT_LT(Clock::now() - before, 3s) << "its peers have seen it";
  const auto until = Clock::now() + 3s;
  while (ranks[0]->watch->rank_that_left() != 1 && Clock::now() < until) {
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_EQ(ranks[0]->watch->rank_that_left(), 1);
  EXPECT_EQ(ranks[0]->watch->rank_that_left(2), -1);
  EXPECT_FALSE(ranks[0]->watch->failed()) << "what was complete stays so";
  begin(*ranks[0]);
  expect_failure(*ranks[0], ErrorCode::kCommPeerLost, 1, "rank 1 was destroyed");
}

TEST(NcclWatch, WhatEndedBeforeAFailure_IsKnownAfterwards) {
  const auto ranks = make_ranks(2);
  ranks[0]->marks.ended[3] = 7;
  ranks[0]->watch->fail(ErrorCode::kCommAborted, 0, "had enough");
  ranks[0]->marks.ended[3] = 8;  // the abort ended this one
  EXPECT_TRUE(ranks[0]->watch->had_ended(3, 7));
  EXPECT_FALSE(ranks[0]->watch->had_ended(3, 8));
}

std::vector<std::unique_ptr<Rank>>* g_left_to_the_process = nullptr;

// Handlers run in reverse: this one where all others have.
[[noreturn]] void leave_ranks_and_exit(bool at_work) {
  std::atexit([] {
    const NcclWatch& peer = *g_left_to_the_process->back()->watch;
    const bool has_left = peer.rank_that_left() == 0;
    const char* const text = peer.failed() ? "its peer was told" : "its thread has ended";
    std::fputs(has_left || peer.failed() ? text : "its thread is at work", stderr);
  });
  g_left_to_the_process = new std::vector<std::unique_ptr<Rank>>(make_ranks(2));
  if (at_work) begin(*g_left_to_the_process->front());
  std::exit(7);
}

TEST(NcclWatch, OneThatNobodyDestroys_EndsBeforeTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(leave_ranks_and_exit(false), ::testing::ExitedWithCode(7), "its thread has ended");
  EXPECT_EXIT(leave_ranks_and_exit(true), ::testing::ExitedWithCode(7), "its peer was told");
}

}  // namespace
}  // namespace conclave
