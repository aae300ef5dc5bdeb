#include "dispatch/permute.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave {
namespace {

using dispatch::AssignmentBlock;
using dispatch::PermuteResult;
using dispatch::PermuteTarget;

struct Problem {
  int64_t top_k = 0;
  int64_t num_local_experts = 0;
  BatchLayout layout = BatchLayout::kContiguous;
  std::vector<std::vector<int32_t>> blocks = {};  // each [rows, top_k]
  std::vector<int64_t> first_rows = {};
};

struct Result {
  PermuteResult counts;
  std::vector<int64_t> begin, count, source_row;
  std::vector<std::vector<int64_t>> slot_of;
};

int64_t rows_of(const Problem& p, size_t block) {
  return static_cast<int64_t>(p.blocks[block].size()) / p.top_k;
}

int64_t total_rows(const Problem& p) {
  int64_t rows = 0;
  for (size_t b = 0; b < p.blocks.size(); ++b) rows += rows_of(p, b);
  return rows;
}

constexpr int64_t kUnwritten = -12345;

Result run(const Problem& p) {
  const auto experts = static_cast<size_t>(p.num_local_experts);
  const int64_t slots = p.layout == BatchLayout::kPadded ? p.num_local_experts * total_rows(p)
                                                         : total_rows(p) * p.top_k;
  Result result;
  result.begin.assign(experts, kUnwritten);
  result.count.assign(experts, kUnwritten);
  result.source_row.assign(static_cast<size_t>(slots), kUnwritten);
  std::vector<int64_t> scratch(experts, 777);
  std::vector<AssignmentBlock> blocks = {};
  for (size_t b = 0; b < p.blocks.size(); ++b) {
    result.slot_of.emplace_back(p.blocks[b].size(), kUnwritten);
  }
  for (size_t b = 0; b < p.blocks.size(); ++b) {
    blocks.push_back(
        {p.blocks[b].data(), rows_of(p, b), p.first_rows[b], result.slot_of[b].data()});
  }
  result.counts = dispatch::permute(blocks, p.top_k,
                                    {.layout = p.layout,
                                     .num_local_experts = p.num_local_experts,
                                     .slots_per_expert = total_rows(p),
                                     .expert_begin = result.begin.data(),
                                     .expert_count = result.count.data(),
                                     .source_row = result.source_row.data(),
                                     .last_row = scratch.data()});
  return result;
}

// Collects, expert by expert, the rows that name it, in a slow and plain way.
void expect_equals_naive(const Problem& p) {
  const Result actual = run(p);
  int64_t next = 0;
  int64_t assignments = 0;
  std::vector<std::vector<int64_t>> slot_of;
  for (const auto& block : p.blocks) slot_of.emplace_back(block.size(), -1);
  for (int64_t expert = 0; expert < p.num_local_experts; ++expert) {
    const int64_t begin = p.layout == BatchLayout::kPadded ? expert * total_rows(p) : next;
    int64_t count = 0;
    for (size_t b = 0; b < p.blocks.size(); ++b) {
      for (int64_t row = 0; row < rows_of(p, b); ++row) {
        bool named = false;
        for (int64_t j = 0; j < p.top_k; ++j) {
          const auto at = static_cast<size_t>(row * p.top_k + j);
          if (p.blocks[b][at] != expert) continue;
          ++assignments;
          named = true;
          slot_of[b][at] = begin + count;
        }
        if (!named) continue;
        EXPECT_EQ(actual.source_row[static_cast<size_t>(begin + count)], p.first_rows[b] + row);
        ++count;
      }
    }
    EXPECT_EQ(actual.begin[static_cast<size_t>(expert)], begin) << "expert " << expert;
    EXPECT_EQ(actual.count[static_cast<size_t>(expert)], count) << "expert " << expert;
    next += count;
  }
  EXPECT_EQ(actual.counts.assignments, assignments);
  EXPECT_EQ(actual.counts.occupied_slots, next);
  EXPECT_EQ(actual.slot_of, slot_of);
}

Problem random_problem(std::vector<int64_t> rows, int64_t top_k, int64_t experts,
                       BatchLayout layout, uint32_t seed) {
  std::mt19937 generator(seed);
  // Some ids lie below and some above the valid range.
  std::uniform_int_distribution<int32_t> id(-2, static_cast<int32_t>(experts) + 1);
  Problem p{.top_k = top_k, .num_local_experts = experts, .layout = layout};
  int64_t first_row = 0;
  for (const int64_t n : rows) {
    std::vector<int32_t> block(static_cast<size_t>(n * top_k));
    for (int32_t& value : block) value = id(generator);
    p.blocks.push_back(block);
    p.first_rows.push_back(first_row);
    first_row += n + 3;  // a gap, as between fixed slots
  }
  return p;
}

TEST(Permute, FieldShapes_EqualTheNaiveSort) {
  uint32_t seed = 1;
  for (const auto layout : {BatchLayout::kContiguous, BatchLayout::kPadded}) {
    for (const int64_t rows : {0, 1, 3, 33, 256}) {
      for (const int64_t top_k : {1, 2, 6, 8, 16}) {
        for (const int64_t experts : {1, 2, 5, 16, 64, 257}) {
          SCOPED_TRACE("rows " + std::to_string(rows) + ", top_k " + std::to_string(top_k) +
                       ", experts " + std::to_string(experts));
          expect_equals_naive(random_problem({rows}, top_k, experts, layout, seed++));
        }
      }
    }
  }
}

TEST(Permute, SeveralBlocks_KeepSourceThenRowOrder) {
  uint32_t seed = 100;
  for (const auto layout : {BatchLayout::kContiguous, BatchLayout::kPadded}) {
    expect_equals_naive(random_problem({0, 5, 0, 17, 1}, 4, 6, layout, seed++));
    expect_equals_naive(random_problem({100, 100, 100}, 8, 3, layout, seed++));
    expect_equals_naive(random_problem({}, 8, 3, layout, seed++));
  }
}

TEST(Permute, NoLocalExperts_SkipsEverything) {
  const Problem p{.top_k = 2, .blocks = {{0, 1, 2, 3}}, .first_rows = {0}};
  const Result result = run(p);
  EXPECT_EQ(result.counts.assignments, 0);
  EXPECT_EQ(result.counts.occupied_slots, 0);
  EXPECT_EQ(result.slot_of[0], (std::vector<int64_t>{-1, -1, -1, -1}));
}

TEST(Permute, HostileIds_AreNeverUsedAsIndex) {
  constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  const Problem p{.top_k = 8,
                  .num_local_experts = 4,
                  .blocks = {{-1, -2, 4, 5, 1 << 15, kMin, kMax, 3}},
                  .first_rows = {0}};
  const Result result = run(p);
  EXPECT_EQ(result.counts.assignments, 1);
  EXPECT_EQ(result.slot_of[0], (std::vector<int64_t>{-1, -1, -1, -1, -1, -1, -1, 0}));
  EXPECT_EQ(result.count, (std::vector<int64_t>{0, 0, 0, 1}));
}

TEST(Permute, RepeatedExpertInARow_SharesOneSlot) {
  const Problem p{
      .top_k = 4, .num_local_experts = 2, .blocks = {{1, 1, 0, 1, 1, 0, 0, 0}}, .first_rows = {10}};
  const Result result = run(p);
  EXPECT_EQ(result.counts.assignments, 8);
  EXPECT_EQ(result.counts.occupied_slots, 4);
  EXPECT_EQ(result.slot_of[0], (std::vector<int64_t>{2, 2, 0, 2, 3, 1, 1, 1}));
  EXPECT_EQ(std::vector<int64_t>(result.source_row.begin(), result.source_row.begin() + 4),
            (std::vector<int64_t>{10, 11, 10, 11}));
}

}  // namespace
}  // namespace conclave
