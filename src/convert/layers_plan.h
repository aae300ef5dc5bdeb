// Plans a result in another container than its source's, which has the MoE layers of the model.
#pragma once

#include "convert/plan.h"
#include "convert/request.h"
#include "convert/source_model.h"

namespace conclave::inline v0::conversion {

// The start of the names under which a directory keeps a GGUF file's other tensors, byte for byte.
inline constexpr std::string_view kKeptPrefix = "gguf.";

// Experts have the request's forms; all else that layers read is F32. Throws Error(kUnsupported)
// for a family that the other container does not state, and as plan_conversion.
ConversionPlan plan_layers(const SourceModel& source, const ResolvedRequest& request);

}  // namespace conclave::inline v0::conversion
