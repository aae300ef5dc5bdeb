// Runs a command's work on every rank: on threads, on the processes that a launcher has started, or
// on processes that it starts.
#pragma once

#include "exit_code.h"
#include "ranks/rank_options.h"
#include "ranks/rank_team.h"

#include <functional>

namespace conclave::tool {

// Returns the worst exit code of all ranks. `work` may throw; an error of one rank ends the others,
// and rank 0 reports it. Throws Error where ranks cannot be started as the options say.
ExitCode run_on_ranks(const RankOptions& options, const std::function<ExitCode(RankTeam&)>& work);

}  // namespace conclave::tool
