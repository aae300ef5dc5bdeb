#include "conclave/regroup.h"

#include "layer/moe_layer_impl.h"
#include "layer/regroup/regrouping.h"

#include "conclave/error.h"

#include <memory>
#include <optional>
#include <utility>

namespace conclave::inline v0 {

// What MoeLayer hides.
struct LayerAccess {
  static LayerBefore before(const MoeLayer& layer) { return layer.impl_->layer.lend_to_ranks(); }
  static MoeLayer make(const Context& context, std::optional<LayerAfter> after) {
    return MoeLayer(
        std::unique_ptr<MoeLayer::Impl>(new MoeLayer::Impl{Layer(context, *std::move(after))}));
  }
};

MoeLayer regroup(const MoeLayer& layer, const Context& context, const RegroupOptions& options) {
  const LayerBefore before = LayerAccess::before(layer);
  return LayerAccess::make(context, regroup_ranks({.before = &before,
                                                   .context = &context,
                                                   .spec = before.spec,
                                                   .layer_options = before.engine.plan().options,
                                                   .options = options}));
}

void hand_over(const MoeLayer& layer, const RegroupOptions& options) {
  const LayerBefore before = LayerAccess::before(layer);
  static_cast<void>(regroup_ranks({.before = &before,
                                   .spec = before.spec,
                                   .layer_options = before.engine.plan().options,
                                   .options = options}));
}

MoeLayer join_layer(const Context& context, const MoeSpec& spec, const LayerOptions& layer_options,
                    const RegroupOptions& options) {
  return LayerAccess::make(
      context,
      regroup_ranks(
          {.context = &context, .spec = spec, .layer_options = layer_options, .options = options}));
}

}  // namespace conclave::inline v0
