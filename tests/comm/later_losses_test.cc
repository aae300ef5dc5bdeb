// Ranks that are lost between a roll call and the barrier behind it: survivors() calls again, and
// speaks of ranks as its caller knows them.
#include "conclave/comm.h"
#include "conclave/error.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;

// What the ranks of a group do next: each group of the story ends with the loss of `lost`, by its
// own number, and goes on with the others; the last has nobody to lose.
struct Chapter {
  int32_t size = 0;
  int32_t lost = -1;
};

// Rank 0 of the group of a chapter.
class Scripted final : public Communicator {
 public:
  Scripted(std::vector<Chapter> story, size_t chapter, std::vector<std::chrono::nanoseconds>* heard)
      : story_(std::move(story)), chapter_(chapter), heard_(heard) {}

  std::string_view name() const noexcept override { return "scripted"; }
  int32_t rank() const noexcept override { return 0; }
  int32_t size() const noexcept override { return story_[chapter_].size; }
  std::chrono::nanoseconds timeout() const noexcept override { return 7s; }
  void wait(CommHandle, std::chrono::nanoseconds, std::string_view phase) override { fail(phase); }
  bool test(CommHandle, std::string_view) override { return true; }
  void abort(std::string_view) noexcept override {}
  Survivors shrink(std::chrono::nanoseconds deadline, std::string_view phase) override {
    heard_->push_back(deadline);
    if (chapter_ + 1 == story_.size()) fail(phase);
    std::vector<int32_t> old_ranks;
    for (int32_t old = 0; old < size(); ++old) {
      if (old != story_[chapter_].lost) old_ranks.push_back(old);
    }
    return {.communicator = std::make_unique<Scripted>(story_, chapter_ + 1, heard_),
            .old_ranks = std::move(old_ranks)};
  }

 protected:
  CommHandle start(const CommOperation&) override { return {1}; }

 private:
  void fail(std::string_view phase) const {
    const int32_t lost = story_[chapter_].lost;
    if (lost < 0) return;
    throw CommError(ErrorCode::kCommPeerLost, lost, std::string(phase), "gone for good");
  }

  std::vector<Chapter> story_;
  size_t chapter_;
  std::vector<std::chrono::nanoseconds>* heard_;
};

// Ranks 0 1 2 3 4 lose 1 first, then 3, which is 2 among 0 2 3 4, then 4, which is 2 among 0 2 4.
TEST(LaterLosses, RollCallsFollowEachOther_AndRanksKeepTheirNumbers) {
  std::vector<std::chrono::nanoseconds> heard;
  Scripted failed({{5, 1}, {4, 2}, {3, 2}, {2, -1}}, 0, &heard);
  const Survivors left = survivors(failed, {.deadline = 3s});
  EXPECT_EQ(left.old_ranks, (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(left.communicator->size(), 2);
  EXPECT_EQ(heard, (std::vector<std::chrono::nanoseconds>(3, 3s)));
}

TEST(LaterLosses, WithoutADeadline_TheGroupsOwnTimeCounts) {
  std::vector<std::chrono::nanoseconds> heard;
  Scripted failed({{3, 1}, {2, -1}}, 0, &heard);
  survivors(failed);
  EXPECT_EQ(heard, (std::vector<std::chrono::nanoseconds>{7s}));
}

// The second roll call fails: its error names rank 2 of the later group as the caller's rank 3.
TEST(LaterLosses, AnErrorOfALaterRollCall_NamesTheCallersRank) {
  std::vector<std::chrono::nanoseconds> heard;
  Scripted failed({{5, 1}, {4, 2}}, 0, &heard);
  try {
    survivors(failed, {.deadline = 3s});
    FAIL() << "no error";
  } catch (const CommError& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCommPeerLost);
    EXPECT_EQ(error.peer(), 3) << error.what();
    EXPECT_EQ(error.phase(), "survivors");
    EXPECT_NE(std::string(error.what()).find("gone for good"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace conclave
