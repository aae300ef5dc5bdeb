// The exit codes of the process; documented in docs/cli.md and the man page.
#pragma once

#include "conclave/error.h"

namespace conclave::tool {

enum class ExitCode : int {
  kOk = 0,
  kOutsideTolerance = 1,
  kUsage = 2,
  kBadInput = 3,
  kResources = 4,
  kInternal = 5,
  kRanks = 6,
  kCancelled = 130,
};

struct ExitCodeMeaning {
  ExitCode code;
  const char* meaning;
};
inline constexpr ExitCodeMeaning kExitCodes[] = {
    {ExitCode::kOk, "Success; every result within tolerance."},
    {ExitCode::kOutsideTolerance, "A result is outside its tolerance."},
    {ExitCode::kUsage, "Wrong usage: an unknown option, a value out of range, an unknown name."},
    {ExitCode::kBadInput, "A file, model or tensor is missing, malformed or unsupported."},
    {ExitCode::kResources, "Out of memory or disk, or the output cannot be written."},
    {ExitCode::kInternal, "A bug of this program. Please report it."},
    {ExitCode::kRanks, "A rank was lost or late, disagreed, or ended the others."},
    {ExitCode::kCancelled, "Ended by Ctrl-C or a request to end (SIGINT, SIGTERM)."},
};

ExitCode exit_code(ErrorCode code) noexcept;

}  // namespace conclave::tool
