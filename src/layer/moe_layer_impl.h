// What MoeLayer hides, for those parts of the library that its users cannot reach.
#pragma once

#include "layer/layer.h"

#include "conclave/layer.h"

namespace conclave::inline v0 {

struct MoeLayer::Impl {
  Layer layer;
};

}  // namespace conclave::inline v0
