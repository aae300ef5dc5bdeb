#include "output/numbers.h"

#include "output/progress.h"
#include "output/terminal.h"

#include <gtest/gtest.h>

namespace conclave::tool {
namespace {

TEST(Numbers, Bytes_HaveThreeDigitsAndTheRightUnit) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(999), "999 B");
  EXPECT_EQ(bytes_text(1000), "1.00 kB");
  EXPECT_EQ(bytes_text(999'499), "999 kB");
  EXPECT_EQ(bytes_text(999'500), "1.00 MB");
  EXPECT_EQ(bytes_text(9'994'000), "9.99 MB");
  EXPECT_EQ(bytes_text(9'996'000), "10.0 MB");
  EXPECT_EQ(bytes_text(12'345'678'901), "12.3 GB");
  EXPECT_EQ(bytes_text(UINT64_MAX), "18447 PB");
}

TEST(Numbers, Counts_UseShortScale) {
  EXPECT_EQ(count_text(512), "512");
  EXPECT_EQ(count_text(30'532'122'624), "30.5 B");
}

TEST(Numbers, Milliseconds_KeepUsefulDigits) {
  EXPECT_EQ(ms_text(0.01234), "0.0123");
  EXPECT_EQ(ms_text(1.2345), "1.234");
  EXPECT_EQ(ms_text(1234.56), "1234.6");
}

TEST(Numbers, Errors_AreShortAndNonFiniteOnesReadable) {
  EXPECT_EQ(error_text(0.00312), "3.1e-03");
  EXPECT_EQ(error_text(1.0 / 0.0), "inf");
}

TEST(Progress, Line_ShowsShareRateAndTimeLeft) {
  EXPECT_EQ(progress_line("layer 3: packing", 500, 1000, 2.0, 100),
            "layer 3: packing [===============               ]  50 %  500 B of 1.00 kB, 250 B/s, "
            "2 s left");
}

TEST(Progress, NarrowTerminal_NeverWraps) {
  for (int columns = 1; columns < 120; ++columns) {
    const std::string line = progress_line("layer 3: packing", 5'000, 10'000'000, 2.0, columns);
    EXPECT_LT(display_width(line), std::max(columns, 2)) << columns;
  }
}

TEST(Terminal, DisplayWidth_CountsCharactersNotBytes) { EXPECT_EQ(display_width("1 ± 2"), 5); }

TEST(Terminal, Paint_WithoutColorChangesNothing) {
  EXPECT_EQ(paint("FAIL", Style::kBad, false), "FAIL");
  EXPECT_EQ(paint("FAIL", Style::kPlain, true), "FAIL");
  EXPECT_EQ(paint("FAIL", Style::kBad, true), "\x1b[1;31mFAIL\x1b[0m");
}

}  // namespace
}  // namespace conclave::tool
