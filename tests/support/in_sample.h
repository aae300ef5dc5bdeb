// Tests that go through a product of sizes in one case: all of it, or under CONCLAVE_TEST_SAMPLE a
// part.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <numeric>
#include <string_view>

namespace conclave::testing {

// Whether a place of a table is visited: under CONCLAVE_TEST_SAMPLE every `step`th is. Of pairs
// that are counted through, each value of either is visited where `step` divides the length of
// neither list.
inline bool in_sample(size_t place, size_t step) {
  return place % step == 0 || std::getenv("CONCLAVE_TEST_SAMPLE") == nullptr;
}

// Where a case begins to count places: cases of one table begin at different ones, so that a sample
// of each visits most of what one of them leaves out.
inline size_t first_place() {
  const std::string_view name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
  return std::accumulate(name.begin(), name.end(), size_t{0}, [](size_t sum, char letter) {
    return sum + static_cast<unsigned char>(letter);
  });
}

}  // namespace conclave::testing
