#include "core/verdicts.h"

#include "core/token_ladder.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

namespace conclave {
namespace {

struct Row {
  std::string_view name;
  int limit;
  Support supports(int size) const {
    return size <= limit ? Support::yes() : Support::no("takes " + std::to_string(limit));
  }
};
constexpr std::array kRows = {Row{"small", 1}, Row{"middle", 10}, Row{"large", 100}};
const Catalog<Row> kCatalog{std::span<const Row>(kRows)};

std::string text(const std::vector<PlanRow>& rows) {
  std::string text;
  for (const PlanRow& row : rows) {
    text += row.name + (row.chosen ? "*: " : ": ") + row.reason + "; ";
  }
  return text;
}

TEST(Verdicts, FirstRowThatFits_IsTakenAndEveryRowHasAReason) {
  std::vector<PlanRow> rows;
  EXPECT_EQ(choose_first(kCatalog, {.table = "size"}, 5, rows)->name, "middle");
  EXPECT_EQ(text(rows),
            "small: takes 1; middle*: first row that fits; large: middle comes first; ");
}

TEST(Verdicts, ForcedRow_PutsTheOthersOut) {
  std::vector<PlanRow> rows;
  const TableChoice choice{.table = "size", .forced = "large"};
  EXPECT_EQ(choose_first(kCatalog, choice, 5, rows)->name, "large");
  EXPECT_EQ(text(rows),
            "small: takes 1; middle: LayerOptions ask for large; large*: asked for by name; ");
  EXPECT_THROW(choose_first(kCatalog, {.table = "size", .forced = "huge"}, 5, rows), Error);
}

TEST(Verdicts, NoRow_ThrowsTheReasonsOfItsTableOnly) {
  std::vector<PlanRow> rows = {{.table = "other", .name = "a", .reason = "b"}};
  EXPECT_EQ(choose_first(kCatalog, {.table = "size"}, 1000, rows), nullptr);
  try {
    throw_no_row("size", rows);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_EQ(error.detail().found, "small: takes 1; middle: takes 10; large: takes 100");
  }
}

struct Rung {
  int64_t last_tokens = 0;
  char kernel = 0;
};

TEST(TokenLadder, NeighboursThatAgree_AreOneRung) {
  std::vector<Rung> ladder;
  const auto agrees = [](const Rung& a, const Rung& b) { return a.kernel == b.kernel; };
  for (const Rung& rung : {Rung{2, 'a'}, Rung{5, 'a'}, Rung{9, 'b'}}) {
    add_rung(ladder, rung, agrees);
  }
  ASSERT_EQ(ladder.size(), 2U);
  EXPECT_EQ(rung_for(ladder, 5).kernel, 'a');
  EXPECT_EQ(rung_for(ladder, 6).kernel, 'b');
  EXPECT_EQ(rung_for(ladder, 100).kernel, 'b');
}

TEST(TokenLadder, CallsOfARange_VisitTheRungsThatServeThem) {
  const std::vector<Rung> ladder = {{2, 'a'}, {5, 'b'}, {9, 'c'}};
  std::string visited;
  for_each_rung(ladder, {.first = 3, .last = 7}, [&](const Rung& rung, int64_t tokens) {
    visited += rung.kernel + std::to_string(tokens);
  });
  EXPECT_EQ(visited, "b5c7");
  const std::vector<CallRange> ranges = calls_by_rung(ladder, 4);
  ASSERT_EQ(ranges.size(), 2U);
  EXPECT_EQ(ranges[1].first, 3);
  EXPECT_EQ(ranges[1].last, 4);
  EXPECT_EQ(calls_by_rung(std::vector<Rung>(), 4).front().last, 4);
}

}  // namespace
}  // namespace conclave
