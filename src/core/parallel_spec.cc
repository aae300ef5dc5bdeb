#include "core/max_ranks.h"

#include "conclave/error.h"
#include "conclave/spec.h"

#include <algorithm>
#include <limits>
#include <string>

namespace conclave::inline v0 {
namespace {

// The largest count that validate(MoeSpec) accepts for anything.
constexpr int32_t kMaxRedundantExperts = int32_t{1} << 20;

void check_range(const std::string& field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "ParallelSpec." + field + " is out of range",
               .found = std::to_string(value),
               .limit = std::to_string(low) + " to " + std::to_string(high)});
}

void check_group(const std::string& group, int32_t size, int32_t rank) {
  check_range(group + "_size", size, 1, std::numeric_limits<int32_t>::max());
  check_range(group + "_rank", rank, 0, int64_t{size} - 1);
}

void check_placement(const ParallelSpec& parallel) {
  check_range("placement", static_cast<int64_t>(parallel.placement), 0,
              static_cast<int64_t>(PlacementStrategy::kCustom));
  const bool custom = parallel.placement == PlacementStrategy::kCustom;
  if (custom == parallel.rank_of.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = custom ? "a custom placement needs ParallelSpec.rank_of"
                                : "ParallelSpec.rank_of is of PlacementStrategy::kCustom only",
                 .found = std::to_string(parallel.rank_of.size()) + " entries"});
  }
  // A full result needs each expert on some rank.
  const int32_t lowest = parallel.reduce == Reduce::kPartial ? -1 : 0;
  for (const int32_t rank : parallel.rank_of) {
    check_range("rank_of", rank, lowest, int64_t{parallel.ep_size} - 1);
  }
}

void check_replicas(const ParallelSpec& parallel) {
  check_range("num_redundant_experts", parallel.num_redundant_experts, 0, kMaxRedundantExperts);
  const auto given = static_cast<int64_t>(parallel.replica_of.size());
  if (given != 0 && given != parallel.num_redundant_experts) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "ParallelSpec.replica_of has an entry for each redundant expert",
                 .expected = std::to_string(parallel.num_redundant_experts),
                 .found = std::to_string(given)});
  }
}

}  // namespace

void validate(const ParallelSpec& parallel) {
  check_range("ep_size", parallel.ep_size, 1, kMaxRanks);
  check_range("tp_size", parallel.tp_size, 1, kMaxRanks);
  check_group("ep", parallel.ep_size, parallel.ep_rank);
  check_group("tp", parallel.tp_size, parallel.tp_rank);
  check_range("reduce", static_cast<int64_t>(parallel.reduce), 0,
              static_cast<int64_t>(Reduce::kPartial));
  check_placement(parallel);
  check_replicas(parallel);
}

ParallelSpec ParallelSpec::flatten(const Groups& groups) {
  check_group("Groups.tp", groups.tp_size, groups.tp_rank);
  check_group("Groups.pcp", groups.pcp_size, groups.pcp_rank);
  check_group("Groups.dp", groups.dp_size, groups.dp_rank);
  // Multiplied in steps: the product of three 31-bit numbers may exceed 63 bits.
  const int64_t replicas = int64_t{groups.dp_size} * groups.pcp_size;
  constexpr int64_t kMaxProduct = std::numeric_limits<int32_t>::max();
  if (replicas > kMaxProduct || replicas * groups.tp_size > kMaxProduct) {
    throw Error(ErrorCode::kSizeOverflow, "the product of the group sizes does not fit 31 bits");
  }
  const int64_t size = replicas * groups.tp_size;
  const int64_t rank =
      (int64_t{groups.dp_rank} * groups.pcp_size + groups.pcp_rank) * groups.tp_size +
      groups.tp_rank;
  ParallelSpec parallel;
  if (groups.expert_parallel && size > 1) {
    parallel.ep_size = static_cast<int32_t>(size);
    parallel.ep_rank = static_cast<int32_t>(rank);
  } else {
    parallel.tp_size = static_cast<int32_t>(size);
    parallel.tp_rank = static_cast<int32_t>(rank);
  }
  return parallel;
}

bool needs_all_to_all(const ParallelSpec::Groups& groups) {
  const ParallelSpec parallel = ParallelSpec::flatten(groups);
  return parallel.ep_size > 1 &&
         (groups.dp_size > 1 || groups.pcp_size > 1 || groups.sequence_parallel);
}

}  // namespace conclave::inline v0
