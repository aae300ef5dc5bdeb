// Selects what the program measures: cases, token counts, variants.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::bench {

struct Options {
  std::vector<std::string> cases;  // from tests/support/cuda/cases.h
  std::vector<int64_t> tokens = {1, 4, 16, 64, 256, 1024, 4096, 16384};
  std::vector<std::string> variants;  // from layer_bench.cc, and "routing"
  double seconds_per_cell = 0.05;     // duration of the replays, at least three
  bool print_plans = false;
};

// Throws std::runtime_error that says what is wrong with the command line.
Options parse_options(int argc, char** argv);

}  // namespace conclave::bench
