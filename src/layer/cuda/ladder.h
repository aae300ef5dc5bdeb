// Chooses the kernel and tile for a number of tokens: a pure function of problem and device.
#pragma once

#include "experts/cuda/device_experts.h"

#include "conclave/layer.h"
#include "conclave/tuning.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace conclave::inline v0 {

// The choice for calls of up to `last_tokens` tokens, above those of the rung before.
struct LadderRung {
  int64_t last_tokens = 0;
  const experts::DeviceKernelRow* row = nullptr;
  experts::DeviceTile tile;
  std::string reason;
  bool adds_rows = false;  // adds up a token's rows, in any order
  // Runs instead if the counts of a call's experts show that choices are skewed; or null.
  const experts::DeviceKernelRow* skewed_row = nullptr;
  experts::DeviceTile skewed_tile = {};
  // With skewed_row: even_tiles for first_tokens, first_tokens + 1, ... to last_tokens.
  int64_t first_tokens = 1;
  std::vector<int64_t> most_even_tiles = {};
};

struct LadderRequest {
  const experts::DeviceExpertsProblem& problem;
  Determinism determinism = Determinism::kRepeatable;
  std::string kernel = {};              // row to force; empty: by rule
  const TuningTable* tuning = nullptr;  // or null
  int32_t shared_experts = 0;           // experts of the problem that every token uses
  // False on a rank that holds a part of the experts. The number of choices that fall on it is
  // unknown, so is the number of tiles that even choices make, and no rung has a second kernel.
  bool has_all_experts = true;
};

// Ascending, the last rung for problem.max_tokens; neighbours that agree are one rung. `verdicts`,
// empty before, gets a verdict on every row of the catalog that is not a single launch, even if
// this throws. Throws
// Error(kUnsupported) with the reasons if no row fits, Error(kUnknownName) for a forced row that
// does not exist, Error(kInvalidArgument) for a tuning entry whose kernel lacks the tile.
std::vector<LadderRung> build_ladder(const LadderRequest& request, std::vector<PlanRow>& verdicts);

// Calls of `first` to `last` tokens.
struct CallRange {
  int64_t first = 1;
  int64_t last = 1;
};

// Visits (rung, tokens) for every rung that serves some of `calls`; `tokens` is its largest call.
template <class Visit>
void for_each_rung(const std::vector<LadderRung>& ladder, const CallRange& calls, Visit visit) {
  for (const LadderRung& rung : ladder) {
    if (rung.last_tokens < calls.first) continue;
    visit(rung, std::min(rung.last_tokens, calls.last));
    if (rung.last_tokens >= calls.last) break;
  }
}

// Splits the calls of up to `max_tokens` tokens by the rung that serves them.
std::vector<CallRange> calls_by_rung(const std::vector<LadderRung>& ladder, int64_t max_tokens);
// The most tokens among `calls` whose rung adds rows; 0 if none does.
int64_t tokens_added(const std::vector<LadderRung>& ladder, const CallRange& calls);

// The most tiles that evenly chosen experts make. With more, choices are skewed and skewed_row
// runs.
int64_t even_tiles(const LadderRung& rung, const experts::DeviceExpertsProblem& problem,
                   int64_t tokens, int64_t shared_experts);

// The key of a problem's entries in tuning tables.
TuningKey tuning_key(const experts::DeviceExpertsProblem& problem);

// The rung that serves a call of `tokens` tokens.
template <class Rung>
const Rung& rung_for(const std::vector<Rung>& ladder, int64_t tokens) {
  for (const Rung& rung : ladder) {
    if (tokens <= rung.last_tokens) return rung;
  }
  return ladder.back();
}

}  // namespace conclave::inline v0
