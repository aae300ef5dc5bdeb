// Compares the outputs of both models' layers, in float64 on the same rows.
#pragma once

#include "input/batch.h"

#include "conclave/checkpoint.h"
#include "conclave/context.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::tool {

struct LayerError {
  int64_t layer = 0;
  double median = 0;  // relative L2 error of a token
  double worst = 0;
  int64_t worst_token = 0;
  std::vector<double> tokens;  // [T]
};

// Rows route by the layer's gate, which both models share. Memory is that of one expert in float64
// for each thread of the context. Throws as BatchSource::load and reference_forward.
LayerError layer_error(const Context& context, const Checkpoint& source, const Checkpoint& result,
                       int64_t layer, const BatchSource& batches);

}  // namespace conclave::tool
