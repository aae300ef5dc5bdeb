// Decides whether measured rates fit the table of arithmetics, and how far they can be trusted.
#pragma once

#include "conclave/context.h"
#include "conclave/device.h"

#include <span>
#include <string>
#include <vector>

namespace conclave::tool {

struct CeilingMeasurement {
  Ceilings ceilings;
  // The processor time that the measuring threads got, relative to what idle CPUs would give them;
  // at most 1.
  double cpu_share = 1;
};

enum class TableVerdict : uint8_t {
  kNotMeasured,  // the arithmetic in question has no rate
  kFits,
  kLooksWrong,  // another arithmetic is faster each time, on an idle machine
  kBusy,        // it seemed faster while others used the CPUs, or only sometimes
};
struct Judgement {
  TableVerdict verdict = TableVerdict::kNotMeasured;
  std::string text;  // "fits: avx512 reaches 554 GFLOP/s, none is faster"
};
// `arithmetic` is the table's choice. Each rate counts with its best measurement.
Judgement judge_arithmetic(std::span<const CeilingMeasurement> measurements,
                           const std::string& arithmetic);

// Returns the best value of every ceiling.
Ceilings best_of(std::span<const CeilingMeasurement> measurements);

// Measures once, and up to twice more as long as the table's choice does not seem to fit.
std::vector<CeilingMeasurement> measure_machine(const Context& context,
                                                const std::string& arithmetic,
                                                const CeilingOptions& options = {});

}  // namespace conclave::tool
