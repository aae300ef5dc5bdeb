// Runs one layer over the ranks of a team, and brings the results to rank 0.
#pragma once

#include "layer_run.h"
#include "ranks/rank_team.h"

#include "conclave/layer.h"
#include "conclave/weights.h"

#include <cstdint>

namespace conclave::tool {

struct SplitLayer {
  const RankTeam& team;
  const Context& context;
  const MoeSpec& spec;
  const WeightSource& source;
  LayerOptions options;
};

// Collective: each rank brings its share of `input`, the whole batch. On rank 0 the result is that
// of the whole batch and the time that of the slowest rank; on others, their own.
LayerRun run_split_layer(const SplitLayer& split, const LayerInput& input, int32_t repetitions);

}  // namespace conclave::tool
