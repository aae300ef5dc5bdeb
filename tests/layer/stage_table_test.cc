// Stages as data: memory is booked by what they read and write, and never shared by buffers that
// hold something at the same time.
#include "layer/stages/host_stages.h"
#include "layer/stages/table.h"
#include "support/layer_parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace conclave {
namespace {

enum class Buffer : uint8_t { kA, kB, kC, kD };
using enum Buffer;
using Bytes = std::array<size_t, 4>;
using Slices = std::array<WorkspaceSlice, 4>;

// kA lives through the first two stages, kB through the last two, kC in the last, kD through all.
std::vector<Stage> three_stages() {
  return {{.name = "one", .writes = BufferSet(kA) | kD},
          {.name = "two", .reads = kA, .writes = kB},
          {.name = "three", .reads = BufferSet(kB) | kD, .writes = kC}};
}

TEST(StageTable, BuffersOfDistinctTimes_ShareMemory) {
  Slices slices{};
  EXPECT_EQ(book_by_lifetime(three_stages(), Bytes{128, 64, 100, 64}, slices), 256U);
  EXPECT_EQ(slices[0].offset, 0U);
  EXPECT_EQ(slices[1].offset, 128U);
  EXPECT_EQ(slices[2].offset, 0U) << "kA is no longer read";
  EXPECT_EQ(slices[3].offset, 192U);
  EXPECT_EQ(slices[2].bytes, 100U);
}

// A debug build ends where a stage asks for a buffer that it does not list.
TEST(StageTable, BufferWhoseMemoryALaterOneHas_MayNotBeAskedFor) {
  Slices slices{};
  book_by_lifetime(three_stages(), Bytes{128, 64, 100, 0}, slices);
  BufferTurns turns;
  for (const size_t buffer : {0U, 1U, 0U, 3U, 2U, 1U, 3U, 2U}) {
    EXPECT_TRUE(turns.take(slices, buffer)) << buffer;
  }
  EXPECT_FALSE(turns.take(slices, 0)) << "kC lies there";
  EXPECT_TRUE(BufferTurns().take(slices, 0)) << "another call";
}

TEST(StageTable, BufferThatAStageIsNotGiven_MayNotBeAskedFor) {
  Slices slices{};
  book_by_lifetime(three_stages(), Bytes{128, 64, 100, 64}, slices);
  std::array<std::byte, 256> memory{};
  BufferTurns turns;
  const Scratch<Buffer> call(memory.data(), slices, {}, &turns);
  const Scratch<Buffer> two = call.only(BufferSet(kA) | kB);
  EXPECT_TRUE(!call.gives(kB) && two.gives(kB));
  EXPECT_FALSE(two.gives(kC));
  EXPECT_EQ(two.at<std::byte>(kB), memory.data() + 128);
  EXPECT_EQ(two.find<std::byte>(kC), nullptr);
  EXPECT_EQ(two.made(kA, 7), 7);
#if !defined(NDEBUG)
  EXPECT_EQ(testing::code_of([&] { two.at<std::byte>(kC); }), ErrorCode::kInternal);
  EXPECT_EQ(testing::code_of([&] { two.made(kC, 7); }), ErrorCode::kInternal);
#endif
}

// Stages of one chunk have views of their own, but memory has one turn after the other for all.
TEST(StageTable, ResultWhoseMemoryALaterStageHas_MayNotBeTaken) {
  Slices slices{};
  book_by_lifetime(three_stages(), Bytes{128, 64, 100, 0}, slices);
  std::array<std::byte, 256> memory{};
  BufferTurns turns;
  const Scratch<Buffer> call(memory.data(), slices, {}, &turns);
  EXPECT_EQ(call.only(kA).at<std::byte>(kA), memory.data());
  EXPECT_EQ(call.only(kA).made(kA, 7), 7);
  EXPECT_EQ(call.only(kC).at<std::byte>(kC), memory.data());
#if !defined(NDEBUG)
  EXPECT_EQ(testing::code_of([&] { call.only(kA).made(kA, 7); }), ErrorCode::kInternal);
#endif
}

TEST(StageTable, BufferThatFitsNoGap_StandsBehind) {
  Slices slices{};
  EXPECT_EQ(book_by_lifetime(three_stages(), Bytes{192, 128, 192, 64}, slices), 384U);
  EXPECT_EQ(slices[1].offset, 192U);
  EXPECT_EQ(slices[3].offset, 320U);
}

// In the list's order kA would lie where kC does not fit beside kB and kD, which live on.
TEST(StageTable, LargeBuffers_HaveTheirPlaceFirst) {
  Slices slices{};
  EXPECT_EQ(book_by_lifetime(three_stages(), Bytes{64, 64, 128, 64}, slices), 256U);
  EXPECT_EQ(slices[2].offset, 0U);
  EXPECT_EQ(slices[0].offset, 0U);
}

TEST(StageTable, AbsentBuffers_TakeNoMemoryAndAreNotListed) {
  Slices slices{};
  EXPECT_EQ(book_by_lifetime(three_stages(), Bytes{0, 64, 0, 0}, slices), 64U);
  constexpr std::array<std::string_view, 4> kNames = {"a", "b", "c", "d"};
  const std::vector<PlanBuffer> buffers = describe_buffers(three_stages(), kNames, slices);
  ASSERT_EQ(buffers.size(), 1U);
  EXPECT_EQ(buffers[0].name, "b");
  EXPECT_EQ(buffers[0].first_stage, "two");
  EXPECT_EQ(buffers[0].last_stage, "three");
}

TEST(StageTable, SizesBeyond63Bits_AreRefused) {
  Slices slices{};
  const size_t half = size_t{1} << 62;
  EXPECT_EQ(testing::code_of([&] {
              book_by_lifetime(three_stages(), Bytes{half, half, 0, half}, slices);
            }),
            ErrorCode::kSizeOverflow);
}

// Lists of up to 12 random stages and 30 buffers: no two of a time overlap, and the total never
// exceeds that of the buffers side by side.
TEST(StageTable, RandomLists_NeverOverlapInTime) {
  std::mt19937 random(5);
  for (int draw = 0; draw < 300; ++draw) {
    const size_t count = 1 + random() % 30;
    std::vector<Stage> stages(1 + random() % 12);
    std::vector<std::array<size_t, 2>> lives(count);
    std::vector<size_t> bytes(count);
    for (size_t i = 0; i < count; ++i) {
      const size_t first = random() % stages.size();
      const size_t last = first + random() % (stages.size() - first);
      stages[first].writes = stages[first].writes | static_cast<Buffer>(i);
      stages[last].reads = stages[last].reads | static_cast<Buffer>(i);
      lives[i] = {first, last};
      bytes[i] = random() % 1000;
    }
    std::vector<WorkspaceSlice> slices(count);
    const size_t total = book_by_lifetime(stages, bytes, slices);
    size_t side_by_side = 0;
    for (size_t i = 0; i < count; ++i) {
      side_by_side += (bytes[i] + 63) / 64 * 64;
      EXPECT_LE(slices[i].offset + slices[i].bytes, total);
      for (size_t j = 0; j < i; ++j) {
        const bool in_time = lives[i][0] <= lives[j][1] && lives[j][0] <= lives[i][1];
        const bool in_space = slices[i].offset < slices[j].offset + slices[j].bytes &&
                              slices[j].offset < slices[i].offset + slices[i].bytes;
        EXPECT_FALSE(in_time && in_space) << "draw " << draw << ", buffers " << i << " and " << j;
      }
    }
    EXPECT_LE(total, side_by_side) << "draw " << draw;
  }
}

TEST(StageTable, PlanOfALayer_NamesItsBuffersWithBytesAndStages) {
  MoeSpec spec = testing::make_spec(8, 2, 64, 32, DType::kBF16);
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 32};
  const Context context({.num_threads = 1});
  const Plan plan = make_plan(context, spec, {.max_tokens = 16});
  const auto find = [&](const std::string& name) {
    return std::find_if(plan.buffers.begin(), plan.buffers.end(),
                        [&](const PlanBuffer& it) { return it.name == name; });
  };
  const auto logits = find("logits");
  ASSERT_NE(logits, plan.buffers.end());
  EXPECT_EQ(logits->bytes, 16U * 8 * sizeof(float));
  EXPECT_EQ(logits->first_stage, "route");
  EXPECT_EQ(logits->last_stage, "route");
  const auto rows = find("expert rows");
  ASSERT_NE(rows, plan.buffers.end());
  EXPECT_EQ(rows->first_stage, "experts silu");
  EXPECT_EQ(rows->last_stage, "combine and finish");
  EXPECT_EQ(find("latent rows"), plan.buffers.end());
  const size_t all = std::accumulate(plan.buffers.begin(), plan.buffers.end(), size_t{0},
                                     [](size_t sum, const auto& it) { return sum + it.bytes; });
  EXPECT_LT(plan.workspace_bytes, all) << "buffers of distinct stages share memory";
  EXPECT_NE(explain(plan).find("expert rows"), std::string::npos);
}

}  // namespace
}  // namespace conclave
