// The slots of a layer on more ranks or fewer: as few experts as possible change their rank.
#include "core/max_places.h"

#include "conclave/error.h"
#include "conclave/regroup.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

using RankExperts = std::vector<std::vector<int32_t>>;

[[noreturn]] void refuse(const char* field, std::string what, std::string found) {
  throw Error(ErrorCode::kInvalidArgument,
              {.what = std::move(what), .tensor = field, .found = std::move(found)});
}

void check_slots(const ExpertSlots& slots) {
  if (slots.num_experts < 1 || slots.num_experts > kMaxPlaces) {
    refuse("num_experts", fmt::format("slots are of 1 to {} experts", kMaxPlaces),
           std::to_string(slots.num_experts));
  }
  if (slots.first_of.empty() || slots.first_of.front() != 0 ||
      !std::ranges::is_sorted(slots.first_of) ||
      slots.first_of.back() != static_cast<int64_t>(slots.logical_of.size())) {
    refuse("first_of", "the slots are not cut into those of each rank",
           fmt::format("{} entries", slots.first_of.size()));
  }
  for (const int32_t expert : slots.logical_of) {
    if (expert >= 0 && expert < slots.num_experts) continue;
    refuse("logical_of", fmt::format("experts are 0 to {}", slots.num_experts - 1),
           std::to_string(expert));
  }
}

void check_ranks(std::span<const int32_t> old_ranks, int32_t ranks) {
  if (old_ranks.empty()) refuse("old_ranks", "a layer is on one rank at least", "none");
  for (size_t i = 0; i < old_ranks.size(); ++i) {
    const int32_t old = old_ranks[i];
    if (old < -1 || old >= ranks) {
      refuse("old_ranks", fmt::format("ranks were 0 to {}, -1 joins", ranks - 1),
             std::to_string(old));
    }
    if (old < 0 || std::ranges::count(old_ranks.first(i), old) == 0) continue;
    refuse("old_ranks", "a rank is named twice", std::to_string(old));
  }
}

bool holds(const std::vector<int32_t>& experts, int32_t expert) {
  return std::ranges::find(experts, expert) != experts.end();
}

class Spread {
 public:
  Spread(const ExpertSlots& before, std::span<const int32_t> old_ranks)
      : wanted_(static_cast<size_t>(before.num_experts), 0), ranks_(old_ranks.size()) {
    for (const int32_t expert : before.logical_of) ++wanted_[static_cast<size_t>(expert)];
    const auto most = static_cast<int32_t>(old_ranks.size());
    for (int32_t& count : wanted_) count = std::clamp(count, 1, most);
    for (size_t rank = 0; rank < old_ranks.size(); ++rank) {
      if (old_ranks[rank] < 0) continue;
      for (const int32_t expert : before.of_rank(old_ranks[rank])) {
        if (!holds(ranks_[rank], expert)) ranks_[rank].push_back(expert);
      }
    }
    share_out();
  }

  ExpertSlots slots() const {
    ExpertSlots slots{.num_experts = static_cast<int64_t>(wanted_.size()), .first_of = {0}};
    for (const auto& experts : ranks_) {
      slots.logical_of.insert(slots.logical_of.end(), experts.begin(), experts.end());
      slots.first_of.push_back(static_cast<int32_t>(slots.logical_of.size()));
    }
    return slots;
  }

 private:
  void share_out() {
    give_sizes();
    std::vector<int32_t> missing = wanted_;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      ranks_[rank].resize(std::min(ranks_[rank].size(), sizes_[rank]));
      for (const int32_t expert : ranks_[rank]) --missing[static_cast<size_t>(expert)];
    }
    for (size_t expert = 0; expert < missing.size(); ++expert) {
      for (; missing[expert] > 0; --missing[expert]) place(static_cast<int32_t>(expert));
    }
  }

  // Ranks that have most hold one more, where not all can hold the same.
  void give_sizes() {
    const auto total = static_cast<size_t>(std::accumulate(wanted_.begin(), wanted_.end(), 0));
    sizes_.assign(ranks_.size(), total / ranks_.size());
    std::vector<size_t> order(ranks_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(
        order, [&](size_t a, size_t b) { return ranks_[a].size() > ranks_[b].size(); });
    for (size_t i = 0; i < total % ranks_.size(); ++i) ++sizes_[order[i]];
  }

  size_t room(size_t rank) const { return sizes_[rank] - ranks_[rank].size(); }

  // The emptiest rank, of those without the expert if there is one with room.
  size_t rank_for(int32_t expert) const {
    const auto better = [&](size_t rank, size_t than) {
      const bool may = room(rank) > 0 && !holds(ranks_[rank], expert);
      const bool other_may = room(than) > 0 && !holds(ranks_[than], expert);
      return may != other_may ? may : room(rank) > room(than);
    };
    size_t best = 0;
    for (size_t rank = 1; rank < ranks_.size(); ++rank) {
      if (better(rank, best)) best = rank;
    }
    return best;
  }

  void place(int32_t expert) {
    const size_t rank = rank_for(expert);
    if (!holds(ranks_[rank], expert)) {
      ranks_[rank].push_back(expert);
      return;
    }
    make_way(expert, rank);
  }

  // Only ranks that have the expert have room. A full rank without it has at least as many as one
  // of these, and so an expert that this one lacks: that moves over, and its slot is free.
  void make_way(int32_t expert, size_t rank_with_room) {
    std::vector<int32_t>& to = ranks_[rank_with_room];
    for (std::vector<int32_t>& from : ranks_) {
      if (holds(from, expert)) continue;
      const auto moves =
          std::ranges::find_if(from, [&](int32_t other) { return !holds(to, other); });
      if (moves == from.end()) continue;
      to.push_back(*moves);
      *moves = expert;
      return;
    }
  }

  std::vector<int32_t> wanted_;  // [E] slots of each expert
  std::vector<size_t> sizes_;    // [ranks] slots of each rank
  RankExperts ranks_;
};

}  // namespace

ExpertSlots spread_over(const ExpertSlots& before, std::span<const int32_t> old_ranks) {
  check_slots(before);
  check_ranks(old_ranks, before.num_ranks());
  return Spread(before, old_ranks).slots();
}

}  // namespace conclave::inline v0
