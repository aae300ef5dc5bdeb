// Launchers that say by the environment which rank a process is, beside those of MPI, which say it
// to their library.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace conclave::tool {

// Variables that this tool sets in ranks that it starts, beside CONCLAVE_RANK_REPORTS.
inline constexpr const char* kRankVariable = "CONCLAVE_RANK";
inline constexpr const char* kRanksVariable = "CONCLAVE_RANKS";

struct LaunchedRank {
  std::string launcher;  // "torchrun"
  int32_t rank = 0;
  int32_t size = 1;
  int32_t ranks_here = 1;  // that share this machine's threads
  // A folder of this launch alone, where ranks of one machine can meet. It may not be there yet.
  std::string meeting;
};

// Whether this tool has started this process as a rank, behind no launcher.
bool is_rank_of_tool();
// None where no launcher has started this process, or has started it alone. Throws
// Error(kInvalidArgument) where a variable is no number or names no rank; Error(kUnsupported) where
// ranks lie on several machines, which such a folder cannot bring together.
std::optional<LaunchedRank> launched_rank();

// FNV-1a.
uint64_t hash_of(std::string_view text) noexcept;

}  // namespace conclave::tool
