#include "placement/balance/rule.h"

#include "conclave/error.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0::placement {
namespace {

// Moves from one placement to better ones, an expert at a time.
class Search {
 public:
  // Less than the least gain is a rounding error, by which moves could follow each other for ever.
  static constexpr double kLeastGain = 1e-9;

  Search(std::span<const double> load, const BalanceRequest& request)
      : load_(load), gain_(std::max(request.least_gain, kLeastGain)), count_(load.size()) {
    const std::vector<int32_t> slots =
        capacities(static_cast<int64_t>(request.previous.size()), request.num_ranks);
    auto next = request.previous.begin();
    for (const int32_t size : slots) {
      ranks_.emplace_back(next, next + size);
      next += size;
    }
    for (const int32_t expert : request.previous) ++count_[static_cast<size_t>(expert)];
    require_all();
  }

  Packs run() {
    look();
    while (improve()) look();
    return std::move(ranks_);
  }

 private:
  struct Move {
    double heaviest = 0;  // the load of a rank that changes
    size_t slot = 0;      // on the busiest rank
    size_t rank = 0;
    size_t other_slot = 0;
    bool is_swap = false;  // else the other slot gets a replica of the busiest rank's expert
  };

  void require_all() const {
    for (size_t expert = 0; expert < count_.size(); ++expert) {
      if (count_[expert] > 0) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "an expert is in no slot",
                   .tensor = "previous",
                   .expected = "every expert for the rule steady",
                   .found = "none of expert " + std::to_string(expert)});
    }
  }

  double share(int32_t expert) const {
    const auto at = static_cast<size_t>(expert);
    return load_[at] / count_[at];
  }
  double share_of_more(int32_t expert, int32_t more) const {
    const auto at = static_cast<size_t>(expert);
    return load_[at] / (count_[at] + more);
  }
  bool has(size_t rank, int32_t expert) const {
    const std::vector<int32_t>& places = places_[static_cast<size_t>(expert)];
    return std::ranges::find(places, static_cast<int32_t>(rank)) != places.end();
  }
  int64_t copies(size_t rank, int32_t expert) const {
    return std::ranges::count(places_[static_cast<size_t>(expert)], static_cast<int32_t>(rank));
  }

  // Sums the load of each rank, and finds the places of each expert.
  void look() {
    loads_.assign(ranks_.size(), 0);
    places_.assign(count_.size(), {});
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      for (const int32_t expert : ranks_[rank]) {
        loads_[rank] += share(expert);
        places_[static_cast<size_t>(expert)].push_back(static_cast<int32_t>(rank));
      }
    }
  }

  // The heavier of two ranks after their slots change places.
  double after_swap(size_t busiest, int32_t expert, size_t rank, int32_t other) const {
    const double moved = share(expert) - share(other);
    return std::max(loads_[busiest] - moved, loads_[rank] + moved);
  }

  // The heaviest of the ranks with either expert after a slot of `other` on `rank` becomes one of
  // `expert`.
  double after_replica(int32_t expert, size_t rank, int32_t other) const {
    const double less = share(expert) - share_of_more(expert, 1);
    const double more = share_of_more(other, -1) - share(other);
    double heaviest = 0;
    const auto consider = [&](int32_t place) {
      const auto at = static_cast<size_t>(place);
      double load = loads_[at] - static_cast<double>(copies(at, expert)) * less +
                    static_cast<double>(copies(at, other)) * more;
      if (at == rank) load += share_of_more(expert, 1) - share_of_more(other, -1);
      heaviest = std::max(heaviest, load);
    };
    std::ranges::for_each(places_[static_cast<size_t>(expert)], consider);
    std::ranges::for_each(places_[static_cast<size_t>(other)], consider);
    return heaviest;
  }

  bool improve() {
    const auto busiest = static_cast<size_t>(std::ranges::max_element(loads_) - loads_.begin());
    Move best{.heaviest = loads_[busiest] * (1 - gain_)};
    bool found = false;
    const auto consider = [&](const Move& move) {
      if (move.heaviest >= best.heaviest) return;
      best = move;
      found = true;
    };
    for (size_t slot = 0; slot < ranks_[busiest].size(); ++slot) {
      const int32_t expert = ranks_[busiest][slot];
      if (share(expert) <= 0) continue;
      for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        if (rank == busiest || has(rank, expert)) continue;
        for (size_t other = 0; other < ranks_[rank].size(); ++other) {
          const int32_t candidate = ranks_[rank][other];
          Move move{.slot = slot, .rank = rank, .other_slot = other, .is_swap = true};
          if (!has(busiest, candidate)) {
            move.heaviest = after_swap(busiest, expert, rank, candidate);
            consider(move);
          }
          if (count_[static_cast<size_t>(candidate)] > 1) {
            move.is_swap = false;
            move.heaviest = after_replica(expert, rank, candidate);
            consider(move);
          }
        }
      }
    }
    if (found) apply(busiest, best);
    return found;
  }

  void apply(size_t busiest, const Move& move) {
    int32_t& expert = ranks_[busiest][move.slot];
    int32_t& other = ranks_[move.rank][move.other_slot];
    if (move.is_swap) {
      std::swap(expert, other);
      return;
    }
    --count_[static_cast<size_t>(other)];
    ++count_[static_cast<size_t>(expert)];
    other = expert;
  }

  std::span<const double> load_;
  double gain_;
  std::vector<int32_t> count_;  // [E] slots
  Packs ranks_ = {};
  std::vector<std::vector<int32_t>> places_ = {};  // [E] the rank of each slot
  std::vector<double> loads_ = {};
};

}  // namespace

Packs balance_steady(std::span<const double> load, const BalanceRequest& request) {
  if (request.previous.empty()) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "the rule steady begins with what is there",
                                              .tensor = "previous",
                                              .expected = "the expert of each slot",
                                              .found = "none"});
  }
  return Search(load, request).run();
}

}  // namespace conclave::inline v0::placement
