// Time and resident memory of what a test runs.
#pragma once

#include "io/io_test_support.h"

#include <algorithm>
#include <cstddef>
#include <time.h>

namespace conclave::testing {

// These leave room for a busy or slow machine; the figures themselves are printed.
inline constexpr double kMaxMillisecondsOf100k = 150.0 * 4;
inline constexpr double kMaxGrowth = 2.3 * 1.5;  // time for 200 k tensors over time for 100 k
inline constexpr double kMaxResidentFactor = 8.0;
inline constexpr size_t kMebibyte = size_t{1} << 20;

// Builds whose times and memory are not judged read a tenth: the same paths, several times slower.
inline constexpr size_t kShare = kIsInstrumented ? 10 : 1;

// Uses processor time, so that other processes on the machine do not count.
inline double cpu_milliseconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

// Builds whose times are not judged take one.
template <class Body>
double best_milliseconds(Body body) {
  double best = 1e9;
  for (int i = 0; i < (kIsInstrumented ? 1 : 7); ++i) {
    const double begin = cpu_milliseconds();
    body();
    best = std::min(best, cpu_milliseconds() - begin);
  }
  return best;
}

// Returns the growth of the peak resident set while `body` runs.
template <class Body>
size_t peak_growth(Body body) {
  reset_peak_resident();
  const size_t before = peak_resident_bytes();
  body();
  return peak_resident_bytes() - before;
}

}  // namespace conclave::testing
