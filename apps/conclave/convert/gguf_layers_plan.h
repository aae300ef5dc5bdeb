// Plans a GGUF file of the MoE layers of a model directory.
#pragma once

#include "convert/plan.h"
#include "convert/request.h"
#include "convert/source_model.h"

namespace conclave::tool {

// Experts have the request's forms, all else is F32. Throws Error(kUnsupported) for a family that
// has no such file, for a GGUF file as the source, and as plan_conversion.
ConversionPlan plan_gguf_layers(const SourceModel& source, const ConvertRequest& request);

}  // namespace conclave::tool
