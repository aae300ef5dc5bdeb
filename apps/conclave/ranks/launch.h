// Starts ranks as processes of this program, itself or by a transport's launcher, and learns what
// became of them: a launcher that lets ranks outlive each other does not tell by its exit status.
#pragma once

#include "exit_code.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace conclave::tool {

// Runs this program once more, with the same arguments, behind the words of `launcher`. Returns the
// worst exit code; a rank that ends without one counts as lost. When a rank has failed, the others
// have `patience` to notice, then the launcher is ended with all of them. So is a rank whose
// process is stopped for longer than that, in whatever it does.
ExitCode launch_ranks(const std::vector<std::string>& launcher, int32_t ranks,
                      std::chrono::seconds patience);

// The same without a launcher: starts the ranks itself, which learn their numbers by launched_rank.
ExitCode start_ranks(int32_t ranks, std::chrono::seconds patience);

// In a rank that start_ranks has started: where ranks meet.
std::string meeting_of_reports();
// In a rank: whether one of these has started it, and what it tells its starter: which process it
// is, so that the starter sees where that is stopped, and its end.
bool was_launched_here();
void announce_to_launcher(int32_t rank);
void report_to_launcher(int32_t rank, ExitCode code);

}  // namespace conclave::tool
