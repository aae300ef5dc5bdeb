// The fields that the plans of all kinds of devices have in common.
#pragma once

#include "layer/rank_part.h"
#include "routing/router.h"

#include "conclave/layer.h"
#include "conclave/placement.h"
#include "conclave/spec.h"

namespace conclave::inline v0 {

struct PlanBase {
  MoeSpec spec;
  ParallelSpec parallel;
  LayerOptions options;
  RankPart part;
  routing::RouterTraits router_traits;
  Plan summary;
};

}  // namespace conclave::inline v0
