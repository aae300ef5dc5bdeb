// Compares the outputs of both models' layers, in float64 on the same rows.
#pragma once

#include "convert/source_model.h"

#include "conclave/checkpoint.h"
#include "conclave/context.h"
#include "conclave/convert.h"

#include <cstdint>

namespace conclave::inline v0::conversion {

// Rows route by the layer's gate, which both models share. Memory is that of one expert in float64
// for each thread of the context. Throws as reference_forward.
ConvertedLayer compare_layer(const Context& context, const SourceModel& source,
                             const Checkpoint& result, int64_t layer, const ComparedRows& rows);

}  // namespace conclave::inline v0::conversion
