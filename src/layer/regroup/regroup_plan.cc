#include "layer/regroup/regroup_plan.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string>

namespace conclave::inline v0 {
namespace {

[[noreturn]] void refuse(const char* field, std::string what, std::string found) {
  throw Error(ErrorCode::kInvalidArgument,
              {.what = std::move(what), .tensor = field, .found = std::move(found)});
}

class Planner {
 public:
  explicit Planner(std::span<const RegroupRank> everyone)
      : everyone_(everyone), given_(everyone.size(), 0) {}

  RegroupMoves plan() {
    moves_.reads.resize(everyone_.size());
    for (size_t rank = 0; rank < everyone_.size(); ++rank) {
      const RegroupRank& to = everyone_[rank];
      moves_.reads[rank].assign(to.wanted.size(), -1);
      if (to.joins()) {
        const size_t giver = giver_of([](const RegroupRank& other) { return other.holds; });
        add({.expert = -1, .to_rank = static_cast<int32_t>(rank)}, giver, moves_.rest);
      }
      for (size_t place = 0; place < to.wanted.size(); ++place) bring(rank, place);
    }
    return std::move(moves_);
  }

 private:
  static bool has(const RegroupRank& rank, int32_t expert) {
    return std::ranges::find(rank.held, expert) != rank.held.end();
  }

  void bring(size_t rank, size_t place) {
    const RegroupRank& to = everyone_[rank];
    const int32_t expert = to.wanted[place];
    if (has(to, expert)) return;
    const size_t giver =
        giver_of([expert](const RegroupRank& other) { return has(other, expert); });
    if (giver < everyone_.size()) {
      const auto& held = everyone_[giver].held;
      const auto from = std::ranges::find(held, expert) - held.begin();
      add({.expert = expert,
           .from_place = static_cast<int32_t>(from),
           .to_rank = static_cast<int32_t>(rank),
           .to_place = static_cast<int32_t>(place)},
          giver, moves_.experts);
      return;
    }
    if (!to.has_source) {
      throw Error(ErrorCode::kTensorMissing,
                  {.what = fmt::format("expert {} is on none of the ranks", expert),
                   .tensor = "source",
                   .hint = "give rank " + std::to_string(rank) + " a source to read it from"});
    }
    moves_.reads[rank][place] = expert;
  }

  // The rank that gives least so far of those that can, lower ones first; one past the last if
  // none can.
  template <class Can>
  size_t giver_of(const Can& can) const {
    size_t best = everyone_.size();
    for (size_t rank = 0; rank < everyone_.size(); ++rank) {
      if (!can(everyone_[rank])) continue;
      if (best == everyone_.size() || given_[rank] < given_[best]) best = rank;
    }
    return best;
  }

  void add(ExpertMove move, size_t giver, std::vector<ExpertMove>& moves) {
    ++given_[giver];
    move.from_rank = static_cast<int32_t>(giver);
    moves.push_back(move);
  }

  std::span<const RegroupRank> everyone_;
  std::vector<int64_t> given_;
  RegroupMoves moves_;
};

}  // namespace

std::vector<int32_t> ranks_of_new_group(std::span<const RegroupRank> everyone) {
  if (std::ranges::none_of(everyone, &RegroupRank::holds)) {
    refuse("everyone", "no rank has the layer", fmt::format("{} ranks", everyone.size()));
  }
  const auto in_group = [](const RegroupRank& rank) { return rank.next_rank >= 0; };
  const auto size = std::ranges::count_if(everyone, in_group);
  if (size == 0) refuse("context", "every rank leaves", fmt::format("{} ranks", everyone.size()));
  std::vector<int32_t> ranks(static_cast<size_t>(size), -1);
  for (size_t rank = 0; rank < everyone.size(); ++rank) {
    const RegroupRank& of = everyone[rank];
    if (!in_group(of)) continue;
    if (of.next_size != size || of.next_rank >= size) {
      refuse("context", fmt::format("the new group has other ranks than the {} that come", size),
             fmt::format("rank {} of {}", of.next_rank, of.next_size));
    }
    int32_t& there = ranks[static_cast<size_t>(of.next_rank)];
    if (there >= 0) {
      refuse("context", "two ranks have the same number in the new group",
             fmt::format("{} twice", of.next_rank));
    }
    there = static_cast<int32_t>(rank);
  }
  return ranks;
}

RegroupMoves plan_regroup(std::span<const RegroupRank> everyone) {
  return Planner(everyone).plan();
}

}  // namespace conclave::inline v0
