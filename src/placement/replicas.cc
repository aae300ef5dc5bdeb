#include "core/max_places.h"

#include "conclave/error.h"
#include "conclave/placement.h"

#include <string>

namespace conclave::inline v0 {

ReplicaMap make_replica_map(std::span<const int32_t> logical_of, int64_t num_experts) {
  if (num_experts < 0 || num_experts > kMaxPlaces) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "no layer has this number of experts",
                                              .tensor = "num_experts",
                                              .found = std::to_string(num_experts),
                                              .limit = "0 to " + std::to_string(kMaxPlaces)});
  }
  ReplicaMap map;
  map.first.assign(static_cast<size_t>(num_experts) + 1, 0);
  for (const int32_t expert : logical_of) {
    if (expert < -1 || expert >= num_experts) {
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "a replica of an expert that does not exist",
                   .tensor = "logical_of",
                   .found = std::to_string(expert),
                   .limit = "-1 to " + std::to_string(num_experts - 1)});
    }
    if (expert >= 0) ++map.first[static_cast<size_t>(expert) + 1];
  }
  for (size_t expert = 1; expert < map.first.size(); ++expert) {
    map.first[expert] += map.first[expert - 1];
  }
  map.physical.resize(static_cast<size_t>(map.first.back()));
  std::vector<int32_t> next = map.first;
  for (size_t physical = 0; physical < logical_of.size(); ++physical) {
    if (logical_of[physical] < 0) continue;
    const int32_t place = next[static_cast<size_t>(logical_of[physical])]++;
    map.physical[static_cast<size_t>(place)] = static_cast<int32_t>(physical);
  }
  return map;
}

int32_t physical_expert(const ReplicaMap& map, int32_t expert, int64_t token) noexcept {
  const auto num_experts = static_cast<int64_t>(map.first.size()) - 1;
  if (expert < 0 || expert >= num_experts) return -1;
  const auto at = static_cast<size_t>(expert);
  const auto count = static_cast<uint32_t>(map.first[at + 1] - map.first[at]);
  if (count == 0) return -1;
  const uint32_t replica = replica_hash(token) % count;
  return map.physical[static_cast<size_t>(map.first[at]) + replica];
}

}  // namespace conclave::inline v0
