// Options of commands that run over several ranks.
#pragma once

#include "command_line.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace conclave::tool {

struct RankOptions {
  std::optional<int64_t> ranks;  // none: those of the launcher, or 1
  std::string transport;         // empty: that of the launcher, or threads
  int32_t tensor_ranks = 1;      // in each tensor-parallel group
  int32_t timeout_s = 30;

  std::chrono::seconds timeout() const { return std::chrono::seconds(timeout_s); }
};
// Adds --ranks, --transport, --tp and --rank-timeout.
void add_rank_options(Command& command, RankOptions& options);

}  // namespace conclave::tool
