// Sources of weights that hold what they read from.
#pragma once

#include "capi/handles.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace conclave::inline v0::capi {

// Throws Error(kLayerNotFound).
std::shared_ptr<const WeightSource> source_of(std::shared_ptr<const Checkpoint> checkpoint,
                                              int64_t index);

using NamedViews = std::map<std::string, ConstTensorView>;
// Throws Error(kNullPointer, kTensorDuplicate) and as view_of.
NamedViews named_views(const conclave_named_tensor* tensors, size_t count);

}  // namespace conclave::inline v0::capi
