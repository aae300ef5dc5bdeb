// Tells what a run's trace says before its first layer runs.
#pragma once

#include "trace/trace_file.h"

#include "conclave/spec.h"

#include <cstdint>
#include <span>
#include <string>

namespace conclave::tool {

struct TracedLayer {
  int64_t layer = 0;
  int64_t tokens = 0;
  MoeSpec spec;
};

// One batch of all tokens. Throws Error(kUnsupported) naming the first layer with other experts,
// choices or tokens than the others.
TraceInfo trace_info(const std::string& model, const std::string& model_type,
                     std::span<const TracedLayer> layers);

}  // namespace conclave::tool
