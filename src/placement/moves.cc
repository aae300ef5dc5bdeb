#include "placement/moves.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace conclave::inline v0 {
namespace {

struct Place {
  int32_t rank = 0;
  int32_t place = 0;
};

// The places now and the slots wanted differ in these.
struct Difference {
  std::vector<std::vector<int32_t>> missing;  // [ranks] experts without a place that may stay
  std::vector<Place> surplus;                 // places whose expert is not wanted there

  bool is_missing_none() const {
    return std::ranges::all_of(missing, [](const auto& experts) { return experts.empty(); });
  }
};

Difference compare(const PlaceTable& table, const ExpertSlots& slots) {
  Difference difference;
  for (int32_t rank = 0; rank < table.num_ranks(); ++rank) {
    const std::span<const int32_t> wanted = slots.of_rank(rank);
    std::vector<int32_t> missing(wanted.begin(), wanted.end());
    const std::span<const int32_t> row = table.of_rank(rank);
    for (int32_t place = 0; place < static_cast<int32_t>(row.size()); ++place) {
      const int32_t expert = row[static_cast<size_t>(place)];
      if (expert < 0) continue;
      const auto found = std::ranges::find(missing, expert);
      // From a temporary place an expert still has to go to one of the layer's.
      if (found == missing.end() || place >= table.addressable(rank)) {
        difference.surplus.push_back({rank, place});
      } else {
        missing.erase(found);
      }
    }
    difference.missing.push_back(std::move(missing));
  }
  return difference;
}

class RoundPlanner {
 public:
  RoundPlanner(const PlaceTable& table, const ExpertSlots& slots)
      : table_(table),
        difference_(compare(table, slots)),
        sends_(table.experts.size(), 0),
        round_{.moves = {}, .after = table} {}

  bool is_done() const { return difference_.is_missing_none() && difference_.surplus.empty(); }
  bool is_empty() const { return round_.moves.empty() && num_dropped_ == 0; }

  void fill_places(bool temporary) {
    for (int32_t rank = 0; rank < table_.num_ranks(); ++rank) {
      const std::span<const int32_t> row = table_.of_rank(rank);
      const int32_t begin = temporary ? table_.addressable(rank) : 0;
      const int32_t end = temporary ? static_cast<int32_t>(row.size()) : table_.addressable(rank);
      const std::vector<int32_t>& missing = difference_.missing[static_cast<size_t>(rank)];
      auto next = missing.begin();
      for (int32_t place = begin; place < end && next != missing.end(); ++place) {
        if (row[static_cast<size_t>(place)] < 0) add_move(*next++, {rank, place});
      }
    }
  }

  // A surplus place is free once its expert has another one.
  void drop_surplus() {
    for (const Place& at : difference_.surplus) {
      int32_t& expert = expert_at(at);
      const auto holds = [&](const auto& row) { return std::ranges::count(row, expert); };
      int64_t places = 0;
      for (const auto& row : round_.after.experts) places += holds(row);
      if (places < 2) continue;
      expert = -1;
      ++num_dropped_;
    }
  }

  MoveRound take() { return std::move(round_); }

 private:
  int32_t& expert_at(const Place& at) {
    return round_.after.experts[static_cast<size_t>(at.rank)][static_cast<size_t>(at.place)];
  }

  // The receiver itself if it has the expert, otherwise the rank that sends least in this round.
  Place source_of(int32_t expert, int32_t receiver) {
    Place best{-1, -1};
    for (int32_t rank = 0; rank < table_.num_ranks(); ++rank) {
      const std::span<const int32_t> row = table_.of_rank(rank);
      const auto found = std::ranges::find(row, expert);
      if (found == row.end()) continue;
      const Place at{rank, static_cast<int32_t>(found - row.begin())};
      if (rank == receiver) return at;
      const auto sends = [&](int32_t of) { return sends_[static_cast<size_t>(of)]; };
      if (best.rank < 0 || sends(rank) < sends(best.rank)) best = at;
    }
    return best;
  }

  void add_move(int32_t expert, const Place& to) {
    const Place from = source_of(expert, to.rank);
    ++sends_[static_cast<size_t>(from.rank)];
    round_.moves.push_back({.expert = expert,
                            .from_rank = from.rank,
                            .from_place = from.place,
                            .to_rank = to.rank,
                            .to_place = to.place});
    expert_at(to) = expert;
  }

  const PlaceTable& table_;
  Difference difference_;
  std::vector<int64_t> sends_;
  MoveRound round_;
  int64_t num_dropped_ = 0;
};

PlaceTable with_temporary_places(PlaceTable table) {
  if (table.has_temporary) return table;
  table.has_temporary = true;
  for (std::vector<int32_t>& row : table.experts) row.push_back(-1);
  return table;
}

PlaceTable without_temporary_places(PlaceTable table) {
  if (!table.has_temporary) return table;
  table.has_temporary = false;
  for (std::vector<int32_t>& row : table.experts) row.pop_back();
  return table;
}

// Nothing where experts change places in a circle and no place is free.
std::optional<std::vector<MoveRound>> plan_rounds(PlaceTable table, const ExpertSlots& slots) {
  std::vector<MoveRound> rounds;
  while (true) {
    RoundPlanner planner(table, slots);
    if (planner.is_done()) return rounds;
    planner.fill_places(false);
    planner.drop_surplus();
    if (planner.is_empty()) {
      planner.fill_places(true);
      planner.drop_surplus();
    }
    if (planner.is_empty()) return std::nullopt;
    rounds.push_back(planner.take());
    table = rounds.back().after;
  }
}

}  // namespace

Support can_hold(const PlaceTable& places, const ExpertSlots& slots) {
  if (slots.first_of.empty() || slots.first_of.front() != 0 ||
      !std::ranges::is_sorted(slots.first_of) ||
      slots.first_of.back() != static_cast<int64_t>(slots.logical_of.size())) {
    return Support::no("first_of does not cut the slots into those of each rank");
  }
  if (slots.num_experts != places.num_experts || slots.num_ranks() != places.num_ranks()) {
    return Support::no(fmt::format("the layer has {} experts on {} ranks, the slots {} on {}",
                                   places.num_experts, places.num_ranks(), slots.num_experts,
                                   slots.num_ranks()));
  }
  if (static_cast<int64_t>(slots.logical_of.size()) > places.num_slots) {
    return Support::no(fmt::format("{} slots, but the layer was planned for {}",
                                   slots.logical_of.size(), places.num_slots));
  }
  for (int32_t rank = 0; rank < places.num_ranks(); ++rank) {
    const auto given = static_cast<int32_t>(slots.of_rank(rank).size());
    if (given <= places.most_experts(rank)) continue;
    return Support::no(fmt::format("rank {} has places for {} experts, the slots give it {}", rank,
                                   places.most_experts(rank), given));
  }
  std::vector<bool> wanted(static_cast<size_t>(places.num_experts), false);
  for (const int32_t expert : slots.logical_of) {
    if (expert < 0 || expert >= places.num_experts) {
      return Support::no(
          fmt::format("a slot has expert {}, outside 0 to {}", expert, places.num_experts - 1));
    }
    wanted[static_cast<size_t>(expert)] = true;
  }
  for (const auto& row : places.experts) {
    for (const int32_t expert : row) {
      if (expert < 0 || wanted[static_cast<size_t>(expert)]) continue;
      return Support::no(fmt::format("expert {} is in no slot", expert));
    }
  }
  return Support::yes();
}

std::vector<MoveRound> plan_moves(const PlaceTable& places, const ExpertSlots& slots,
                                  bool with_temporary) {
  if (const Support support = can_hold(places, slots); !support) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "the layer cannot have these slots",
                                              .tensor = "slots",
                                              .found = support.reason()});
  }
  std::optional<std::vector<MoveRound>> rounds = plan_rounds(places, slots);
  if (!rounds && with_temporary) rounds = plan_rounds(with_temporary_places(places), slots);
  if (!rounds) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "experts change places in a circle, and no place is free",
                 .tensor = "slots",
                 .hint = "create the layer with LayerOptions.spare_experts, or use the "
                         "synchronous update_placement"});
  }
  if (!rounds->empty()) rounds->back().after = without_temporary_places(rounds->back().after);
  return *std::move(rounds);
}

}  // namespace conclave::inline v0
