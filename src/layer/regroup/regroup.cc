#include "conclave/regroup.h"

#include "layer/moe_layer_impl.h"
#include "layer/regroup/regrouping.h"

#include "conclave/error.h"

namespace conclave::inline v0 {

MoeLayer regroup(const MoeLayer& layer, const Context& context, const RegroupOptions& options) {
  const LayerBefore before = LayerAccess::of(layer).lend_to_ranks();
  return LayerAccess::make(context, *regroup_ranks({.before = &before,
                                                    .context = &context,
                                                    .spec = before.spec,
                                                    .layer_options = before.engine.plan().options,
                                                    .options = options}));
}

void hand_over(const MoeLayer& layer, const RegroupOptions& options) {
  const LayerBefore before = LayerAccess::of(layer).lend_to_ranks();
  static_cast<void>(regroup_ranks({.before = &before,
                                   .spec = before.spec,
                                   .layer_options = before.engine.plan().options,
                                   .options = options}));
}

MoeLayer join_layer(const Context& context, const MoeSpec& spec, const LayerOptions& layer_options,
                    const RegroupOptions& options) {
  return LayerAccess::make(
      context,
      *regroup_ranks(
          {.context = &context, .spec = spec, .layer_options = layer_options, .options = options}));
}

}  // namespace conclave::inline v0
