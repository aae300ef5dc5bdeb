#include "placement/epoch.h"

#include "core/word_hash.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

PlaceTable first_places(const ExpertPlacement& placement, int32_t num_spare) {
  PlaceTable places{.num_experts = placement.num_experts,
                    .num_slots = placement.num_physical(),
                    .num_spare = num_spare};
  for (const std::vector<int32_t>& owned : placement.experts_of) {
    std::vector<int32_t>& row = places.experts.emplace_back();
    for (const int32_t physical : owned) {
      row.push_back(placement.logical_of[static_cast<size_t>(physical)]);
    }
    row.insert(row.end(), static_cast<size_t>(num_spare), -1);
  }
  return places;
}

void add_all(WordHash& hash, std::span<const int32_t> values) {
  hash.add(values.size());
  for (const int32_t value : values) hash.add(value);
}

int64_t key_of(const PlaceTable& places) {
  WordHash hash;
  for (const std::vector<int32_t>& row : places.experts) add_all(hash, row);
  return hash.key();
}

// Gives the expert of a place a physical number: its own, or one more for a replica.
void number_place(ExpertPlacement& placement, int32_t expert, int32_t rank, int32_t place) {
  auto physical = static_cast<size_t>(expert);
  if (placement.rank_of[physical] < 0) {
    placement.rank_of[physical] = rank;
    placement.local_of[physical] = place;
  } else {
    physical = placement.logical_of.size();
    placement.logical_of.push_back(expert);
    placement.rank_of.push_back(rank);
    placement.local_of.push_back(place);
  }
  placement.experts_of[static_cast<size_t>(rank)].push_back(static_cast<int32_t>(physical));
}

}  // namespace

bool PlaceTable::is_addressable() const {
  return !has_temporary || std::ranges::all_of(experts, [](const std::vector<int32_t>& row) {
    return row.back() < 0;
  });
}

std::shared_ptr<const PlacementEpoch> first_epoch(int64_t num_experts, const ParallelSpec& parallel,
                                                  int32_t num_spare) {
  auto epoch = std::make_shared<PlacementEpoch>();
  epoch->experts = make_placement(num_experts, parallel);
  epoch->places = first_places(epoch->experts, num_spare);
  epoch->key = key_of(epoch->places);
  if (epoch->experts.num_physical() > num_experts) {
    epoch->replicas = make_replica_map(epoch->experts.logical_of, num_experts);
  }
  return epoch;
}

std::shared_ptr<const PlacementEpoch> epoch_of_places(uint64_t number, PlaceTable places) {
  auto epoch = std::make_shared<PlacementEpoch>();
  epoch->number = number;
  ExpertPlacement& placement = epoch->experts;
  const auto experts = static_cast<size_t>(places.num_experts);
  placement.strategy = PlacementStrategy::kCustom;
  placement.num_ranks = places.num_ranks();
  placement.num_experts = places.num_experts;
  placement.logical_of.resize(experts);
  std::iota(placement.logical_of.begin(), placement.logical_of.end(), 0);
  placement.rank_of.assign(experts, -1);
  placement.local_of.assign(experts, -1);
  placement.experts_of.resize(places.experts.size());
  for (int32_t rank = 0; rank < places.num_ranks(); ++rank) {
    const std::span<const int32_t> row = places.of_rank(rank);
    for (size_t place = 0; place < row.size(); ++place) {
      if (row[place] < 0) continue;
      number_place(placement, row[place], rank, static_cast<int32_t>(place));
    }
  }
  if (places.num_slots > places.num_experts) {
    epoch->replicas = make_replica_map(placement.logical_of, places.num_experts);
  }
  epoch->key = key_of(places);
  epoch->places = std::move(places);
  return epoch;
}

ExpertSlots slots_of(const PlaceTable& places) {
  ExpertSlots slots{.num_experts = places.num_experts, .first_of = {0}};
  for (const std::vector<int32_t>& row : places.experts) {
    std::ranges::copy_if(row, std::back_inserter(slots.logical_of),
                         [](int32_t expert) { return expert >= 0; });
    slots.first_of.push_back(static_cast<int32_t>(slots.logical_of.size()));
  }
  return slots;
}

ExpertSlots slots_of(int64_t num_experts, const ParallelSpec& parallel) {
  return slots_of(first_places(make_placement(num_experts, parallel), 0));
}

int64_t key_of(const ExpertSlots& slots) {
  WordHash hash;
  hash.add(slots.num_experts);
  add_all(hash, slots.logical_of);
  add_all(hash, slots.first_of);
  return hash.key();
}

Support can_follow(const PlacementEpoch& planned, const PlacementEpoch& next) {
  const auto differ = [](const char* what, int64_t from, int64_t to) {
    return Support::no(std::string("the plan is for ") + std::to_string(from) + " " + what +
                       ", the epoch has " + std::to_string(to));
  };
  const ExpertPlacement& from = planned.experts;
  const ExpertPlacement& to = next.experts;
  if (from.num_experts != to.num_experts) {
    return differ("experts", from.num_experts, to.num_experts);
  }
  if (from.num_physical() < to.num_physical()) {
    return differ("physical experts", from.num_physical(), to.num_physical());
  }
  if (from.num_ranks != to.num_ranks) return differ("ranks", from.num_ranks, to.num_ranks);
  for (size_t rank = 0; rank < to.experts_of.size(); ++rank) {
    const int32_t places = planned.places.addressable(static_cast<int32_t>(rank));
    const int32_t given = next.places.addressable(static_cast<int32_t>(rank));
    if (given <= places) continue;
    return Support::no("rank " + std::to_string(rank) + " has places for " +
                       std::to_string(places) + " experts, the epoch gives " +
                       std::to_string(given));
  }
  return Support::yes();
}

}  // namespace conclave::inline v0
