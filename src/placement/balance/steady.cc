#include "placement/balance/rule.h"

#include "conclave/error.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <tuple>

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
    while (improve()) {
    }
    return std::move(ranks_);
  }

 private:
  // The best move leaves least on the heaviest rank that changes, and is the first of equals.
  struct Move {
    double heaviest = 0;
    size_t slot = 0;  // on the busiest rank
    size_t rank = 0;
    size_t other_slot = 0;
    bool is_replica = false;  // the other slot gets a replica of the busiest rank's expert

    auto order() const { return std::tie(heaviest, slot, rank, other_slot, is_replica); }
  };
  struct Best {
    Move move;
    bool found = false;

    bool wants(double heaviest) const {
      return found ? heaviest <= move.heaviest : heaviest < move.heaviest;
    }
    void consider(const Move& other) {
      if (!wants(other.heaviest) || (found && move.order() <= other.order())) return;
      move = other;
      found = true;
    }
  };
  // A slot of the busiest rank whose expert goes to another rank, or gets a replica there.
  struct Giver {
    size_t rank = 0;
    size_t slot = 0;
    int32_t expert = 0;
    double share = 0;
    double next_share = 0;  // with a replica more
    double left = 0;        // the least load of its rank with a replica more
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
  const std::vector<int32_t>& places(int32_t expert) const {
    return places_[static_cast<size_t>(expert)];
  }
  bool has(size_t rank, int32_t expert) const {
    return std::ranges::binary_search(places(expert), static_cast<int32_t>(rank));
  }
  int64_t copies(size_t rank, int32_t expert) const {
    return std::ssize(std::ranges::equal_range(places(expert), static_cast<int32_t>(rank)));
  }

  // Finds the places of each expert and the load of each rank.
  void look() {
    places_.assign(count_.size(), {});
    loads_.assign(ranks_.size(), 0);
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      for (const int32_t expert : ranks_[rank]) {
        places_[static_cast<size_t>(expert)].push_back(static_cast<int32_t>(rank));
      }
      add_up(rank);
    }
  }
  // Slots are added in their order, as sums in another one round otherwise.
  void add_up(size_t rank) {
    loads_[rank] = 0;
    for (const int32_t expert : ranks_[rank]) loads_[rank] += share(expert);
  }

  // The heavier of two ranks after their slots change places.
  double after_swap(const Giver& giver, size_t rank, int32_t other) const {
    const double moved = giver.share - share(other);
    return std::max(loads_[giver.rank] - moved, loads_[rank] + moved);
  }

  // The heaviest of the ranks with either expert after a slot of `other` on `rank` becomes one of
  // the giver's.
  double after_replica(const Giver& giver, size_t rank, int32_t other) const {
    const int32_t expert = giver.expert;
    const double less = giver.share - giver.next_share;
    const double more = share_of_more(other, -1) - share(other);
    double heaviest = 0;
    const auto consider = [&](int32_t place) {
      const auto at = static_cast<size_t>(place);
      double load = loads_[at] - static_cast<double>(copies(at, expert)) * less +
                    static_cast<double>(copies(at, other)) * more;
      if (at == rank) load += giver.next_share - share_of_more(other, -1);
      heaviest = std::max(heaviest, load);
    };
    std::ranges::for_each(places(expert), consider);
    std::ranges::for_each(places(other), consider);
    return heaviest;
  }
  // At least this is on `rank` then, with one slot of `other` there.
  double least_after_replica(const Giver& giver, size_t rank, int32_t other) const {
    const double other_share = share_of_more(other, -1);
    return loads_[rank] + (other_share - share(other)) + (giver.next_share - other_share);
  }

  // No swap of two ranks leaves less than their mean on the heavier one; the factor is for sums
  // that were rounded.
  double mean(size_t one, size_t other) const {
    constexpr double kRoundedMean = 0.5 * (1 - 1e-14);
    return (loads_[one] + loads_[other]) * kRoundedMean;
  }

  Giver giver_of(size_t rank, size_t slot) const {
    const int32_t expert = ranks_[rank][slot];
    Giver giver{.rank = rank,
                .slot = slot,
                .expert = expert,
                .share = share(expert),
                .next_share = share_of_more(expert, 1)};
    const auto replicas = static_cast<double>(copies(rank, expert));
    giver.left = loads_[rank] - replicas * (giver.share - giver.next_share);
    return giver;
  }

  void consider(const Giver& giver, size_t rank, Best& best) const {
    const bool may_swap = best.wants(mean(giver.rank, rank));
    const bool may_replicate = best.wants(giver.left);
    if (!(may_swap || may_replicate) || has(rank, giver.expert)) return;
    for (size_t other = 0; other < ranks_[rank].size(); ++other) {
      const int32_t candidate = ranks_[rank][other];
      Move move{.slot = giver.slot, .rank = rank, .other_slot = other};
      if (may_swap) {
        move.heaviest = after_swap(giver, rank, candidate);
        if (best.wants(move.heaviest) && !has(giver.rank, candidate)) best.consider(move);
      }
      if (!may_replicate || count_[static_cast<size_t>(candidate)] < 2) continue;
      if (!best.wants(least_after_replica(giver, rank, candidate))) continue;
      move.is_replica = true;
      move.heaviest = after_replica(giver, rank, candidate);
      best.consider(move);
    }
  }

  bool improve() {
    const auto busiest = static_cast<size_t>(std::ranges::max_element(loads_) - loads_.begin());
    Best best{.move = {.heaviest = loads_[busiest] * (1 - gain_)}};
    // The lightest ranks offer the best moves, by which most of the others need no look.
    std::vector<size_t> by_load(ranks_.size());
    std::iota(by_load.begin(), by_load.end(), size_t{0});
    std::ranges::sort(by_load, {}, [this](size_t rank) { return loads_[rank]; });
    for (size_t slot = 0; slot < ranks_[busiest].size(); ++slot) {
      const Giver giver = giver_of(busiest, slot);
      if (giver.share <= 0) continue;
      for (const size_t rank : by_load) {
        if (rank != busiest) consider(giver, rank, best);
      }
    }
    if (best.found) apply(busiest, best.move);
    return best.found;
  }

  void move_place(int32_t expert, size_t from, size_t to) {
    std::vector<int32_t>& list = places_[static_cast<size_t>(expert)];
    list.erase(std::ranges::lower_bound(list, static_cast<int32_t>(from)));
    add_place(expert, to);
  }
  void add_place(int32_t expert, size_t rank) {
    std::vector<int32_t>& list = places_[static_cast<size_t>(expert)];
    const auto place = static_cast<int32_t>(rank);
    list.insert(std::ranges::upper_bound(list, place), place);
  }

  void apply(size_t busiest, const Move& move) {
    int32_t& expert = ranks_[busiest][move.slot];
    int32_t& other = ranks_[move.rank][move.other_slot];
    if (!move.is_replica) {
      move_place(expert, busiest, move.rank);
      move_place(other, move.rank, busiest);
      std::swap(expert, other);
      add_up(busiest);
      add_up(move.rank);
      return;
    }
    std::vector<int32_t> changed = places(other);
    --count_[static_cast<size_t>(other)];
    ++count_[static_cast<size_t>(expert)];
    std::vector<int32_t>& list = places_[static_cast<size_t>(other)];
    list.erase(std::ranges::lower_bound(list, static_cast<int32_t>(move.rank)));
    add_place(expert, move.rank);
    other = expert;
    changed.insert(changed.end(), places(expert).begin(), places(expert).end());
    std::ranges::sort(changed);
    const auto repeated = std::ranges::unique(changed);
    changed.erase(repeated.begin(), repeated.end());
    for (const int32_t rank : changed) add_up(static_cast<size_t>(rank));
  }

  std::span<const double> load_;
  double gain_;
  std::vector<int32_t> count_;  // [E] slots
  Packs ranks_ = {};
  std::vector<std::vector<int32_t>> places_ = {};  // [E] the rank of each slot, ascending
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
