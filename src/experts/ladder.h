// Chooses the kernel of a CPU, and on a GPU the kernel and its tile for each number of tokens: a
// pure function of problem and device.
#pragma once

#include "core/token_ladder.h"
#include "experts/catalog.h"
#include "experts/cuda/device_experts.h"

#include "conclave/layer.h"
#include "conclave/tuning.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::inline v0::experts {

struct LadderRung {
  int64_t last_tokens = 0;
  const DeviceKernelRow* row = nullptr;
  DeviceTile tile = {};
  std::string reason = {};
  bool adds_rows = false;  // adds up a token's rows, in any order
  // Runs instead if the counts of a call's experts show that choices are skewed; or null.
  const DeviceKernelRow* skewed_row = nullptr;
  DeviceTile skewed_tile = {};
  // With skewed_row: even_tiles for first_tokens, first_tokens + 1, ... to last_tokens.
  int64_t first_tokens = 1;
  std::vector<int64_t> most_even_tiles = {};
};

// True if a rung's kernel reads quantised rows as values of bf16.
bool reads_values(const LadderRung& rung, const ExpertsProblem& problem);

struct LadderRequest {
  const ExpertsProblem& problem;
  Determinism determinism = Determinism::kRepeatable;
  std::string kernel = {};              // row to force; empty: by rule
  const TuningTable* tuning = nullptr;  // or null
  int32_t shared_experts = 0;           // experts of the problem that every token uses
  // False on a rank that holds a part of the experts. The number of choices that fall on it is
  // unknown, so is the number of tiles that even choices make, and no rung has a second kernel.
  bool has_all_experts = true;
};

// The first row that supports the problem, or the forced one: kernels of a CPU compute every number
// of tokens in the same way. `verdicts` gets one on every row, even if this throws. Throws
// Error(kUnsupported) with the reasons if no row fits, Error(kUnknownName) for a forced row that
// does not exist.
const HostKernelRow& choose_host_kernel(const ExpertsProblem& problem, const std::string& forced,
                                        std::vector<PlanRow>& verdicts);

// Ascending, the last rung for problem.max_tokens; neighbours that agree are one rung. `verdicts`,
// without any on kernels before, gets one on every row that is not a single launch, even if this
// throws. Throws Error(kUnsupported) with the reasons if no row fits,
// Error(kUnknownName) for a forced row that does not exist, Error(kInvalidArgument) for a tuning
// entry whose kernel lacks the tile.
std::vector<LadderRung> build_ladder(const LadderRequest& request, std::vector<PlanRow>& verdicts);

// The most tokens among `calls` whose rung adds rows; 0 if none does.
int64_t tokens_added(const std::vector<LadderRung>& ladder, const CallRange& calls);

// The most tiles that evenly chosen experts make. With more, choices are skewed and skewed_row
// runs.
int64_t even_tiles(const LadderRung& rung, const ExpertsProblem& problem, int64_t tokens,
                   int64_t shared_experts);

// The key of a problem's entries in tuning tables.
TuningKey tuning_key(const ExpertsProblem& problem);

}  // namespace conclave::inline v0::experts
