// Makes ids and weights of a batch on the host.
#pragma once

#include "core/device_flow.h"

#include <cstdint>
#include <span>
#include <vector>

namespace conclave::testing {

enum class RoutingKind : uint8_t {
  kUniform,  // k distinct experts, all equally likely
  kZipf,     // k distinct experts, expert of rank r (shuffled) with probability ~ 1 / (r + 1)
  kOneHot,   // the first choice of every token is one expert; the others come from the lower half
  kHoles,    // like kUniform; about every fifth id is -1
};

struct RoutingShape {
  int64_t num_tokens = 0;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  RoutingKind kind = RoutingKind::kUniform;
  uint64_t seed = 1;
};

struct HostRouting {
  std::vector<int32_t> ids;    // [T, k]
  std::vector<float> weights;  // [T, k], positive, with sum 1 per token
};
HostRouting make_routing(const RoutingShape& shape);

// The grouping that dispatch makes from ids, computed on the host.
struct HostGroups {
  std::vector<int32_t> expert_begin;  // [E + 1]
  std::vector<int32_t> row_slot;
  std::vector<int32_t> slot_row;  // -1: no row
  std::vector<TokenTile> tiles;
};
HostGroups group_rows(std::span<const int32_t> ids, int64_t num_experts, int32_t tile_tokens);

}  // namespace conclave::testing
