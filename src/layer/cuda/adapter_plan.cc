#include "layer/cuda/adapter_plan.h"

#include <string>

namespace conclave::inline v0 {
namespace {

using experts::AdapterKernelRow;
using experts::DeviceTile;

bool keeps_bits(const experts::LadderRung& rung, const AdapterKernelRow& row) {
  return rung.row->arithmetic == row.arithmetic &&
         (rung.skewed_row == nullptr || rung.skewed_row->arithmetic == row.arithmetic);
}

// The widest tile that is no wider than the ladder's, which was chosen for as many rows an expert,
// and of those the one with as many weight rows.
DeviceTile tile_of(const AdapterKernelRow& row, const experts::ExpertsProblem& problem,
                   const DeviceTile& usual) {
  const std::span<const DeviceTile> tiles = row.tiles(problem);
  DeviceTile best = tiles.front();
  for (const DeviceTile& tile : tiles) {
    if (tile.tokens > usual.tokens || tile.tokens < best.tokens) continue;
    if (tile.tokens > best.tokens || tile.features == usual.features) best = tile;
  }
  return best;
}

}  // namespace

Support plan_adapters(CudaMlpPlan& part) {
  const experts::ExpertsProblem& problem = part.problem;
  for (const experts::LadderRung& rung : part.ladder) {
    AdapterRung own{.last_tokens = rung.last_tokens};
    std::string reasons;
    for (const AdapterKernelRow& row : experts::adapter_kernels()) {
      const Support support = row.supports(problem);
      if (!support) {
        reasons += (reasons.empty() ? "" : "; ") + std::string(row.name) + ": " + support.reason();
        continue;
      }
      const bool in_one_pass = keeps_bits(rung, row);
      if (own.row != nullptr && !in_one_pass) continue;
      own.row = &row;
      own.in_one_pass = in_one_pass;
      if (in_one_pass) break;
    }
    if (own.row == nullptr) return Support::no("no kernel takes them: " + reasons);
    own.tile = tile_of(*own.row, problem, rung.tile);
    part.adapters.push_back(own);
  }
  return Support::yes();
}

}  // namespace conclave::inline v0
