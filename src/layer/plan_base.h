// The fields that the plans of all kinds of devices have in common.
#pragma once

#include "layer/chunks.h"
#include "layer/rank_part.h"
#include "routing/router.h"

#include "conclave/layer.h"
#include "conclave/placement.h"
#include "conclave/spec.h"

#include <optional>

namespace conclave::inline v0 {

struct PlanBase {
  MoeSpec spec;
  ParallelSpec parallel;
  LayerOptions options;
  RankPart part;
  routing::RouterTraits router_traits;
  std::optional<ChunkRule> chunk_rule;  // none: calls above max_tokens are cut, others are not
  Plan summary;
};

}  // namespace conclave::inline v0
