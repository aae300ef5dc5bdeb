// MoeLayer hides this; parts of the library that its users cannot reach may see it.
#pragma once

#include "layer/layer.h"

#include "conclave/layer.h"

#include <memory>
#include <utility>

namespace conclave::inline v0 {

struct MoeLayer::Impl {
  Layer layer;
};

// For parts that are no friends of it.
struct LayerAccess {
  static Layer& of(const MoeLayer& layer) { return layer.impl_->layer; }
  static MoeLayer make(const Context& context, LayerAfter after) {
    return MoeLayer(
        std::unique_ptr<MoeLayer::Impl>(new MoeLayer::Impl{Layer(context, std::move(after))}));
  }
};

}  // namespace conclave::inline v0
