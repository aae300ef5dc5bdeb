#include "dispatch/cuda/catalog.h"

#include "core/checked.h"
#include "core/rank_counts.h"
#include "core/token_ladder.h"
#include "dispatch/cuda/group_shape.h"

#include "conclave/comm.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>

namespace conclave::inline v0::dispatch {
namespace {

Support local_supports(const DispatchProblem& problem) {
  if (problem.ep_size == 1 || problem.reduce == Reduce::kPartial) return Support::yes();
  return Support::no("moves no rows between ranks");
}

Support gather_supports(const DispatchProblem& problem) {
  if (problem.ep_size == 1) return Support::no("all experts are on this rank");
  if (problem.reduce == Reduce::kPartial)
    return Support::no("the caller adds up: Reduce::kPartial");
  const Communicator* const ranks = problem.communicator;
  if (ranks == nullptr) {
    return Support::no("the context has no communicator; Reduce::kPartial needs none");
  }
  if (ranks->size() != problem.ep_size || ranks->rank() != problem.ep_rank) {
    return Support::no(
        fmt::format("the communicator is rank {} of {}, the layer is planned as rank {} of {}",
                    ranks->rank(), ranks->size(), problem.ep_rank, problem.ep_size));
  }
  if (problem.ep_size > kMostGatheringRanks) {
    return Support::no(
        fmt::format("{} ranks; rows gather from {} at most", problem.ep_size, kMostGatheringRanks));
  }
  for (const CommFeature feature : {CommFeature::kDeviceMemory, CommFeature::kStreamOrder}) {
    if (Support can = ranks->supports(feature); !can) return can;
  }
  return Support::yes();
}

constexpr std::array kDispatchers = {
    DeviceDispatcherRow{.name = "cuda.local", .moves_rows = false, .supports = local_supports},
    DeviceDispatcherRow{.name = "cuda.gather", .moves_rows = true, .supports = gather_supports},
};

constexpr int32_t kClusterBlocks = 8;  // every device with clusters can hold this many
constexpr int64_t kWarp = 32;
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// Every expert has a thread.
GroupShape shape_of(GroupShape shape, int64_t threads, int64_t num_local_experts) {
  shape.threads = static_cast<int32_t>(round_up(std::max(threads, num_local_experts), kWarp));
  shape.shared_bytes = group_shared_bytes(shape.threads, num_local_experts);
  return shape;
}
GroupShape one_block(int64_t slots, int64_t num_local_experts) {
  return shape_of({.blocks = 1}, std::clamp<int64_t>(slots, 64, 256), num_local_experts);
}
template <int kThreads>
GroupShape cluster(int64_t /*slots*/, int64_t num_local_experts) {
  return shape_of({.blocks = kClusterBlocks, .cluster = kClusterBlocks}, kThreads,
                  num_local_experts);
}
template <int kBlocks>
GroupShape counted(int64_t /*slots*/, int64_t num_local_experts) {
  return shape_of({.blocks = kBlocks}, kGroupMaxThreads, num_local_experts);
}

// The sizes were measured on an H200 with 8 to 256 experts.
constexpr std::array kRows = {
    DeviceGroupRow{.name = "cuda.group_block",
                   .most_slots = 768,
                   .reason = "one block, which waits for no other",
                   .shape = one_block},
    DeviceGroupRow{.name = "cuda.group_cluster",
                   .most_slots = 4096,
                   .reason = "a cluster, whose blocks tell each other their counts",
                   .shape = cluster<256>},
    DeviceGroupRow{.name = "cuda.group_wide_cluster",
                   .most_slots = 16384,
                   .reason = "a cluster of larger blocks",
                   .shape = cluster<512>},
    // Every block reads the counts of all, so more blocks pay for themselves only late.
    DeviceGroupRow{.name = "cuda.group_counted",
                   .most_slots = 65536,
                   .reason = "more blocks than a cluster holds: one launch counts, one places",
                   .shape = counted<kGroupMaxBlocks / 2>},
    DeviceGroupRow{.name = "cuda.group_counted_wide",
                   .most_slots = kUnlimited,
                   .reason = "twice as many blocks",
                   .shape = counted<kGroupMaxBlocks>},
};

constexpr std::array kChecks = {
    DeviceCheckRow{.name = "cuda.check_with_group",
                   .with_group = true,
                   .reason = "one launch, whose warps take at most two tokens each"},
    DeviceCheckRow{.name = "cuda.check_then_group",
                   .with_group = false,
                   .reason = "checks are spread over the device"},
};

// The first row that suits calls of so many slots and keeps to the limits; null if none does.
const DeviceGroupRow* row_for(int64_t slots, int64_t num_local_experts, const GroupLimits& limits) {
  const auto row = std::find_if(kRows.begin(), kRows.end(), [&](const DeviceGroupRow& candidate) {
    return slots <= candidate.most_slots && supports(candidate, num_local_experts, limits);
  });
  return row == kRows.end() ? nullptr : &*row;
}

// A warp checks one token's ids at a time, about a microsecond each: more than two turns cost more
// than a launch with one warp per token.
int64_t most_checked_tokens(const GroupShape& shape) {
  constexpr int64_t kMaxTurns = 2;
  return shape.counts_first() ? 0 : kMaxTurns * shape.blocks * shape.threads / kWarp;
}

// Slots at which a shape may change: the sizes of the rows, and whole warps of one block.
std::vector<int64_t> breaks_in_slots() {
  std::vector<int64_t> slots;
  for (int64_t threads = 64; threads < 256; threads += kWarp) slots.push_back(threads);
  for (const DeviceGroupRow& row : kRows) slots.push_back(row.most_slots);
  return slots;
}

GroupLaunches launches_of(const DeviceGroupRow& row, int64_t num_tokens,
                          const DeviceGroupProblem& problem) {
  const GroupShape shape =
      row.shape(num_tokens * problem.slots_per_token, problem.num_local_experts);
  return {.shape = shape, .checks_ids = num_tokens <= most_checked_tokens(shape)};
}

}  // namespace

Catalog<DeviceDispatcherRow> device_dispatcher_catalog() {
  return Catalog<DeviceDispatcherRow>(kDispatchers);
}

Catalog<DeviceCheckRow> device_check_catalog() { return Catalog<DeviceCheckRow>(kChecks); }

Catalog<DeviceGroupRow> device_group_catalog() { return Catalog<DeviceGroupRow>(kRows); }

Support supports(const DeviceGroupRow& row, int64_t num_local_experts, const GroupLimits& limits) {
  const GroupShape largest = row.shape(row.most_slots, num_local_experts);
  if (largest.cluster > limits.cluster_blocks) {
    return Support::no("needs clusters of " + std::to_string(largest.cluster) +
                       " blocks; the device's code has " + std::to_string(limits.cluster_blocks));
  }
  if (dynamic_shared_fits(largest.shared_bytes, limits.shared_bytes)) return Support::yes();
  return Support::no("needs " + std::to_string(largest.shared_bytes + kGroupOwnSharedBytes) +
                     " bytes of shared memory for " + std::to_string(num_local_experts) +
                     " experts; a block has " + std::to_string(limits.shared_bytes));
}

GroupLaunches group_launches(int64_t num_tokens, int64_t slots_per_token,
                             int64_t num_local_experts) {
  return launches_of(*row_for(num_tokens * slots_per_token, num_local_experts, {}), num_tokens,
                     {.slots_per_token = slots_per_token, .num_local_experts = num_local_experts});
}

std::vector<GroupRung> group_ladder(const DeviceGroupProblem& problem) {
  std::vector<GroupRung> ladder;
  const auto add = [&](const DeviceGroupRow& row, int64_t last_tokens) {
    const int64_t before = ladder.empty() ? 0 : ladder.back().last_tokens;
    if (last_tokens <= before) return;
    GroupRung rung = {.last_tokens = last_tokens,
                      .row = &row,
                      .launches = launches_of(row, last_tokens, problem)};
    rung.check = rung.launches.checks_ids ? &kChecks.front() : &kChecks.back();
    add_rung(ladder, rung, [](const GroupRung& a, const GroupRung& b) {
      return a.row == b.row && a.launches == b.launches;
    });
  };
  for (const int64_t slots : breaks_in_slots()) {
    const int64_t last = std::min(slots / problem.slots_per_token, problem.max_tokens);
    if (last == 0) continue;
    const int64_t last_slots = last * problem.slots_per_token;
    const DeviceGroupRow* const row =
        row_for(last_slots, problem.num_local_experts, problem.limits);
    if (row == nullptr) return {};
    // Within a shape, few tokens have their ids checked in the same launch.
    const GroupShape shape = row->shape(last_slots, problem.num_local_experts);
    add(*row, std::min(last, most_checked_tokens(shape)));
    add(*row, last);
  }
  return ladder;
}

}  // namespace conclave::inline v0::dispatch
