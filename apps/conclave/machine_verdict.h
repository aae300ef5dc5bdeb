// Whether measured rates fit the table of arithmetics, and how far they can be trusted.
#pragma once

#include "conclave/context.h"
#include "conclave/device.h"

#include <span>
#include <string>
#include <vector>

namespace conclave::tool {

struct Measurement {
  Ceilings ceilings;
  // The processor time that the measuring threads got, of what they would get on idle CPUs; at
  // most 1.
  double cpu_share = 1;
};

enum class TableVerdict : uint8_t {
  kNotMeasured,  // no rate of the arithmetic in question
  kFits,
  kLooksWrong,  // another arithmetic is faster, on a machine that was idle, each time
  kBusy,        // it seemed faster while others used the CPUs, or not each time
};
struct Judgement {
  TableVerdict verdict = TableVerdict::kNotMeasured;
  std::string text;  // "fits: avx512 reaches 554 GFLOP/s, none is faster"
};
// `arithmetic` is the table's choice. A rate counts by its best measurement.
Judgement judge_arithmetic(std::span<const Measurement> measurements,
                           const std::string& arithmetic);

// The best of every ceiling.
Ceilings best_of(std::span<const Measurement> measurements);

// Measures once, and up to twice more while the table's choice does not seem to fit.
std::vector<Measurement> measure_machine(const Context& context, const std::string& arithmetic);

}  // namespace conclave::tool
