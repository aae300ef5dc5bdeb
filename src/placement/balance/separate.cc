#include "placement/balance/rule.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace conclave::inline v0::placement {
namespace {

// The shares of slots that may be taken, and the load of the lightest rank that has one.
struct Offer {
  double least_share = std::numeric_limits<double>::infinity();
  double most_share = -std::numeric_limits<double>::infinity();
  double least_load = std::numeric_limits<double>::infinity();

  bool is_empty() const { return most_share < least_share; }
};

Offer either(const Offer& one, const Offer& other) {
  return {.least_share = std::min(one.least_share, other.least_share),
          .most_share = std::max(one.most_share, other.most_share),
          .least_load = std::min(one.least_load, other.least_load)};
}

// A binary tree over places in order, each node with the offers below it.
class OfferTree {
 public:
  static constexpr size_t kRoot = 1;

  explicit OfferTree(size_t places) : leaves_(std::bit_ceil(std::max<size_t>(places, 1))) {
    nodes_.resize(2 * leaves_);
  }
  void set(size_t place, const Offer& offer) {
    size_t node = leaves_ + place;
    nodes_[node] = offer;
    for (node /= 2; node >= kRoot; node /= 2) nodes_[node] = joined(node);
  }
  void fill(size_t place, const Offer& offer) { nodes_[leaves_ + place] = offer; }
  void finish() {
    for (size_t node = leaves_ - 1; node >= kRoot; --node) nodes_[node] = joined(node);
  }
  const Offer& operator[](size_t node) const { return nodes_[node]; }
  bool is_leaf(size_t node) const { return node >= leaves_; }
  // The first place below a node.
  size_t first_place(size_t node) const {
    return (node << (std::bit_width(leaves_) - std::bit_width(node))) - leaves_;
  }

 private:
  Offer joined(size_t node) const { return either(nodes_[2 * node], nodes_[2 * node + 1]); }

  size_t leaves_;
  std::vector<Offer> nodes_;
};

// Finds the swap of a second replica with another rank's slot after which the heavier of the two
// ranks is lightest, the first of equals. It must not make a new pair without ending one: so the
// number of pairs shrinks. Nodes below which no slot could do better are left out, so that few of
// the slots are looked at.
class Swaps {
 public:
  Swaps(std::span<const double> share, size_t first, size_t last, Packs& ranks)
      : share_(share),
        first_(first),
        ranks_(std::span(ranks).subspan(first, last - first)),
        num_ranks_of_(share.size()),
        by_rank_(ranks_.size()) {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      loads_.push_back(load_of(rank));
      OfferTree& slots = by_slot_.emplace_back(ranks_[rank].size());
      for (size_t slot = 0; slot < ranks_[rank].size(); ++slot) {
        const int32_t expert = ranks_[rank][slot];
        if (++copies_[key(rank, expert)] == 1) ++num_ranks_of_[static_cast<size_t>(expert)];
        slots.fill(slot, offer_of(share_of(expert)));
      }
      slots.finish();
      by_rank_.fill(rank, offer_of(rank));
    }
    by_rank_.finish();
  }

  bool is_pair(size_t rank, size_t slot) const {
    return copies(rank - first_, ranks_[rank - first_][slot]) > 1;
  }

  bool perform(size_t absolute_rank, size_t slot) {
    const size_t rank = absolute_rank - first_;
    const int32_t expert = ranks_[rank][slot];
    if (num_ranks_of_[static_cast<size_t>(expert)] == static_cast<int32_t>(ranks_.size())) {
      return false;
    }
    Search search{.rank = rank, .expert = expert};
    look_at_ranks(search, OfferTree::kRoot, bound_of_ranks(search, OfferTree::kRoot));
    if (!search.found) return false;
    swap({rank, slot}, search.best);
    return true;
  }

  // Slots that could not be taken for a rank may be for the next one.
  void end_rank() {
    for (const Place& place : refused_) {
      put(place, share_of(ranks_[place.rank][place.slot]));
    }
    refused_.clear();
  }

 private:
  struct Place {
    size_t rank = 0;
    size_t slot = 0;
  };
  // A search for a place for one of two replicas of an expert on a rank.
  struct Search {
    size_t rank = 0;
    int32_t expert = 0;
    bool found = false;
    Place best = {};
    double least = std::numeric_limits<double>::infinity();  // after that swap

    bool wants(double load, const Place& first) const {
      if (load != least) return load < least;
      if (!found) return true;
      return first.rank != best.rank ? first.rank < best.rank : first.slot < best.slot;
    }
  };

  static Offer offer_of(double share) {
    return {.least_share = share, .most_share = share, .least_load = 0};
  }
  Offer offer_of(size_t rank) const {
    Offer offer = by_slot_[rank][OfferTree::kRoot];
    offer.least_load = loads_[rank];
    return offer;
  }
  uint64_t key(size_t rank, int32_t expert) const {
    return uint64_t{rank} * share_.size() + static_cast<uint64_t>(expert);
  }
  int32_t copies(size_t rank, int32_t expert) const {
    const auto found = copies_.find(key(rank, expert));
    return found == copies_.end() ? 0 : found->second;
  }
  double share_of(int32_t expert) const { return share_[static_cast<size_t>(expert)]; }
  // Slots are added in their order, as sums in another one round otherwise.
  double load_of(size_t rank) const {
    double load = 0;
    for (const int32_t expert : ranks_[rank]) load += share_of(expert);
    return load;
  }

  // The heavier rank's load after the swap, bit for bit where the offer is one slot's. No slot of
  // several makes less: rounded differences keep their order, and one of two loads is not below
  // their mean, which a swap does not change. Infinite for no slot.
  double bound(const Search& search, const Offer& offer, double other_load) const {
    constexpr double kRoundedMean = 0.5 * (1 - 1e-14);
    const double load = loads_[search.rank];
    const double share = share_of(search.expert);
    const double heavier =
        std::max(load - (share - offer.least_share), other_load + (share - offer.most_share));
    if (offer.least_share == offer.most_share) return heavier;
    return std::max(heavier, (load + other_load) * kRoundedMean);
  }
  double bound_of_ranks(const Search& search, size_t node) const {
    const Offer& offer = by_rank_[node];
    return bound(search, offer, offer.least_load);
  }
  double bound_of_slots(const Search& search, size_t rank, size_t node) const {
    return bound(search, by_slot_[rank][node], loads_[rank]);
  }

  // Both halves of a node, first the one that could do better.
  template <class Look, class Bound>
  static void look_at_halves(size_t node, const Bound& bound, const Look& look) {
    const double left = bound(2 * node);
    const double right = bound(2 * node + 1);
    if (left <= right) look(2 * node, left);
    look(2 * node + 1, right);
    if (left > right) look(2 * node, left);
  }

  void look_at_ranks(Search& search, size_t node, double bound) {
    const Place first{.rank = by_rank_.first_place(node)};
    if (by_rank_[node].is_empty() || !search.wants(bound, first)) return;
    if (by_rank_.is_leaf(node)) {
      bool is_open = true;
      look_at_slots(search, first.rank, OfferTree::kRoot, bound, is_open);
      return;
    }
    look_at_halves(
        node, [&](size_t half) { return bound_of_ranks(search, half); },
        [&](size_t half, double its) { look_at_ranks(search, half, its); });
  }

  // Closed is a rank that has a replica of the expert: it takes no other.
  void look_at_slots(Search& search, size_t rank, size_t node, double bound, bool& is_open) {
    const Place first{.rank = rank, .slot = by_slot_[rank].first_place(node)};
    if (!is_open || by_slot_[rank][node].is_empty() || !search.wants(bound, first)) return;
    if (by_slot_[rank].is_leaf(node)) {
      is_open = copies(rank, search.expert) == 0;
      if (is_open) consider(search, first, bound);
      return;
    }
    look_at_halves(
        node, [&](size_t half) { return bound_of_slots(search, rank, half); },
        [&](size_t half, double its) { look_at_slots(search, rank, half, its, is_open); });
  }

  void consider(Search& search, const Place& place, double load) {
    if (may_take(search.rank, place)) {
      search.found = true;
      search.best = place;
      search.least = load;
      return;
    }
    // For this rank it stays so: a rank keeps a replica of all that it has, and others get none of
    // what they have.
    put(place, std::nullopt);
    refused_.push_back(place);
  }

  // False for a slot that would end no pair and make one.
  bool may_take(size_t rank, const Place& place) const {
    const int32_t candidate = ranks_[place.rank][place.slot];
    return copies(rank, candidate) == 0 || copies(place.rank, candidate) > 1;
  }

  void put(const Place& place, std::optional<double> share) {
    by_slot_[place.rank].set(place.slot, share ? offer_of(*share) : Offer());
    by_rank_.set(place.rank, offer_of(place.rank));
  }

  void move_copy(int32_t expert, size_t from, size_t to) {
    int32_t& count = num_ranks_of_[static_cast<size_t>(expert)];
    const auto left = copies_.find(key(from, expert));
    if (--left->second == 0) {
      copies_.erase(left);
      --count;
    }
    if (++copies_[key(to, expert)] == 1) ++count;
  }

  void swap(const Place& mine, const Place& other) {
    int32_t& here = ranks_[mine.rank][mine.slot];
    int32_t& there = ranks_[other.rank][other.slot];
    move_copy(here, mine.rank, other.rank);
    move_copy(there, other.rank, mine.rank);
    std::swap(here, there);
    if (share_of(here) == share_of(there)) return;
    for (const Place& place : {mine, other}) {
      loads_[place.rank] = load_of(place.rank);
      put(place, share_of(ranks_[place.rank][place.slot]));
    }
  }

  std::span<const double> share_;
  size_t first_;
  std::span<std::vector<int32_t>> ranks_;
  std::vector<double> loads_;
  std::unordered_map<uint64_t, int32_t> copies_;  // replicas by rank and expert
  std::vector<int32_t> num_ranks_of_;             // [E] ranks with a replica
  std::vector<OfferTree> by_slot_;                // one for each rank
  OfferTree by_rank_;
  std::vector<Place> refused_;
};

bool has_pair(std::span<const std::vector<int32_t>> ranks, size_t num_experts) {
  std::vector<size_t> last_rank(num_experts);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const int32_t expert : ranks[rank]) {
      size_t& last = last_rank[static_cast<size_t>(expert)];
      if (last == rank + 1) return true;
      last = rank + 1;
    }
  }
  return false;
}

}  // namespace

void separate(std::span<const double> share, size_t first, size_t last, Packs& ranks) {
  if (!has_pair(std::span(ranks).subspan(first, last - first), share.size())) return;
  Swaps swaps(share, first, last, ranks);
  for (bool swapped = true; swapped;) {
    swapped = false;
    for (size_t rank = first; rank < last; ++rank) {
      for (size_t slot = 0; slot < ranks[rank].size(); ++slot) {
        if (!swaps.is_pair(rank, slot)) continue;
        swapped = swaps.perform(rank, slot) || swapped;
      }
      swaps.end_rank();
    }
  }
}

}  // namespace conclave::inline v0::placement
