// Tests that go through a product of sizes in one case: all of it, or under CONCLAVE_TEST_SAMPLE a
// part.
#pragma once

#include <cstddef>
#include <cstdlib>

namespace conclave::testing {

// Whether a place of a table is visited: under CONCLAVE_TEST_SAMPLE every `step`th is. Of pairs
// that are counted through, each value of either is visited where `step` divides the length of
// neither list.
inline bool in_sample(size_t place, size_t step) {
  return place % step == 0 || std::getenv("CONCLAVE_TEST_SAMPLE") == nullptr;
}

}  // namespace conclave::testing
