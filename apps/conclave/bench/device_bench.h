// conclave bench on a GPU: times whole layers in graphs and searches for the fastest kernels.
#pragma once

#include "bench/measure.h"
#include "exit_code.h"
#include "input/machine_options.h"
#include "input/shape_options.h"

#include "conclave/context.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::tool {

struct DeviceBenchOptions {
  std::vector<NamedShape> shapes;
  std::vector<int64_t> tokens;
  std::string routing;  // as given, for the table
  MeasureOptions measure;
  MachineOptions machine;
  std::string format;
};
// Prints one row per shape and number of tokens. Collective; rank 0 prints.
ExitCode run_device_bench(const RankTeam& team, const Context& context,
                          const DeviceBenchOptions& options, Console& console);

struct TuneOptions {
  int32_t budget_seconds = 120;
  std::string out = "tuning.txt";
};
// Measures every choice for each shape and number of tokens that the table in `out` lacks, until
// the budget is spent. The table is written after each, so a later run continues where this one
// stopped. Throws Error(kFileWrite).
ExitCode run_device_tuning(const Context& context, const DeviceBenchOptions& options,
                           const TuneOptions& tune, Console& console);

}  // namespace conclave::tool
