// Which kernel and which tile serve a number of tokens: a pure function of problem and device.
#pragma once

#include "experts/cuda/device_experts.h"

#include "conclave/layer.h"
#include "conclave/tuning.h"

#include <algorithm>
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
  // Runs instead where the counts of a call's experts say that choices are skewed; or null.
  const experts::DeviceKernelRow* skewed_row = nullptr;
  experts::DeviceTile skewed_tile = {};
};

struct LadderRequest {
  const experts::DeviceExpertsProblem& problem;
  Determinism determinism = Determinism::kRepeatable;
  std::string kernel = {};              // row to force; empty: by rule
  const TuningTable* tuning = nullptr;  // or null
  int32_t shared_experts = 0;           // of the problem's, which every token uses
  // Of a part of the experts it is not known how many of a token's choices lie here: what even
  // choices make of so many tokens is not either, and no rung has a second kernel.
  bool has_all_experts = true;
};

// Ascending, the last for problem.max_tokens; one rung where neighbours agree. `verdicts`, empty
// before, gets one on every row of the catalog, also where this throws. Throws Error(kUnsupported)
// with the reasons where none fits, Error(kUnknownName) for a forced row that does not exist,
// Error(kInvalidArgument) for a tuning entry whose kernel lacks the tile.
std::vector<LadderRung> build_ladder(const LadderRequest& request, std::vector<PlanRow>& verdicts);

// Calls of `first` to `last` tokens.
struct CallRange {
  int64_t first = 1;
  int64_t last = 1;
};

// Visits (rung, tokens) for every rung that serves some of these calls, `tokens` the most of them.
template <class Visit>
void for_each_rung(const std::vector<LadderRung>& ladder, const CallRange& calls, Visit visit) {
  for (const LadderRung& rung : ladder) {
    if (rung.last_tokens < calls.first) continue;
    visit(rung, std::min(rung.last_tokens, calls.last));
    if (rung.last_tokens >= calls.last) break;
  }
}

// The calls of up to `max_tokens` tokens, cut where another rung serves them; the last ends there.
std::vector<CallRange> calls_by_rung(const std::vector<LadderRung>& ladder, int64_t max_tokens);
// The most tokens of these calls that a rung serves which adds rows; 0: none does.
int64_t tokens_added(const std::vector<LadderRung>& ladder, const CallRange& calls);

// More tiles than this are more than evenly chosen experts make: what skewed_row is for.
int64_t even_tiles(const LadderRung& rung, const experts::DeviceExpertsProblem& problem,
                   int64_t tokens, int64_t shared_experts);

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
