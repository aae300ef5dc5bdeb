// Which kernel and which tile serve a number of tokens: a pure function of problem and device.
#pragma once

#include "experts/cuda/device_experts.h"

#include "conclave/layer.h"
#include "conclave/tuning.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::inline v0 {

// What serves calls of up to `last_tokens` tokens, above those of the rung before.
struct LadderRung {
  int64_t last_tokens = 0;
  const experts::DeviceKernelRow* row = nullptr;
  experts::DeviceTile tile;
  std::string reason;
  bool adds_rows = false;  // of a token, in any order
};

struct LadderRequest {
  const experts::DeviceExpertsProblem& problem;
  Determinism determinism = Determinism::kRepeatable;
  std::string kernel = {};              // row to force; empty: by rule
  const TuningTable* tuning = nullptr;  // or null
  int32_t shared_experts = 0;           // of the problem's, which every token uses
};

// Ascending, the last for problem.max_tokens; one rung where neighbours agree. `verdicts`, empty
// before, gets one on every row of the catalog, also where this throws. Throws Error(kUnsupported)
// with the reasons where none fits, Error(kUnknownName) for a forced row that does not exist,
// Error(kInvalidArgument) for a tuning entry whose kernel lacks the tile.
std::vector<LadderRung> build_ladder(const LadderRequest& request, std::vector<PlanRow>& verdicts);

// The most of up to `tokens` tokens that a rung serves which adds rows; 0: none does.
int64_t tokens_added(const std::vector<LadderRung>& ladder, int64_t tokens);

// The key of a problem's entries in tuning tables.
TuningKey tuning_key(const experts::DeviceExpertsProblem& problem);

// The rung for a call of `tokens`.
template <class Rung>
const Rung& rung_for(const std::vector<Rung>& ladder, int64_t tokens) {
  for (const Rung& rung : ladder) {
    if (tokens <= rung.last_tokens) return rung;
  }
  return ladder.back();
}

}  // namespace conclave::inline v0
