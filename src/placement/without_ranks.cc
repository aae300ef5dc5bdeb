// The split of a layer after some of its ranks have gone.
#include "conclave/balance.h"
#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

[[noreturn]] void refuse(const char* field, std::string what, std::string expected,
                         std::string found) {
  throw Error(ErrorCode::kInvalidArgument, {.what = std::move(what),
                                            .tensor = field,
                                            .expected = std::move(expected),
                                            .found = std::move(found)});
}

void check_ranks(std::span<const int32_t> old_ranks, int32_t rank, int32_t ranks) {
  if (old_ranks.empty()) refuse("old_ranks", "nobody is left", "one rank at least", "none");
  for (size_t i = 0; i < old_ranks.size(); ++i) {
    const int32_t least = i == 0 ? 0 : old_ranks[i - 1] + 1;
    if (old_ranks[i] >= least && old_ranks[i] < ranks) continue;
    refuse("old_ranks", "ranks that are left ascend and exist",
           fmt::format("{} to {} at {}", least, ranks - 1, i), std::to_string(old_ranks[i]));
  }
  const auto left = static_cast<int32_t>(old_ranks.size());
  if (rank >= 0 && rank < left) return;
  refuse("rank", "no rank of this number is left", fmt::format("0 to {}", left - 1),
         std::to_string(rank));
}

using RankExperts = std::vector<std::vector<int32_t>>;

// Replicas of an expert on one rank serve no better than one.
std::vector<int32_t> without_repeats(std::span<const int32_t> experts) {
  std::vector<int32_t> kept;
  for (const int32_t expert : experts) {
    if (std::ranges::find(kept, expert) == kept.end()) kept.push_back(expert);
  }
  return kept;
}

void give_lost_experts(int64_t num_experts, RankExperts& ranks) {
  std::vector<uint8_t> held(static_cast<size_t>(num_experts), 0);
  for (const auto& experts : ranks) {
    for (const int32_t expert : experts) held[static_cast<size_t>(expert)] = 1;
  }
  for (size_t expert = 0; expert < held.size(); ++expert) {
    if (held[expert] != 0) continue;
    const auto lightest = std::ranges::min_element(
        ranks, [](const auto& a, const auto& b) { return a.size() < b.size(); });
    lightest->push_back(static_cast<int32_t>(expert));
  }
}

ExpertSlots to_slots(int64_t num_experts, const RankExperts& ranks) {
  ExpertSlots slots{.num_experts = num_experts, .first_of = {0}};
  for (const auto& experts : ranks) {
    slots.logical_of.insert(slots.logical_of.end(), experts.begin(), experts.end());
    slots.first_of.push_back(static_cast<int32_t>(slots.logical_of.size()));
  }
  return slots;
}

}  // namespace

ParallelSpec without_ranks(int64_t num_experts, const ParallelSpec& parallel,
                           std::span<const int32_t> old_ranks, int32_t rank) {
  const ExpertSlots before = slots_of(num_experts, parallel);
  check_ranks(old_ranks, rank, before.num_ranks());
  RankExperts ranks;
  for (const int32_t old : old_ranks) ranks.push_back(without_repeats(before.of_rank(old)));
  give_lost_experts(num_experts, ranks);
  ParallelSpec split = with_slots(parallel, to_slots(num_experts, ranks));
  split.ep_rank = rank;
  return split;
}

}  // namespace conclave::inline v0
