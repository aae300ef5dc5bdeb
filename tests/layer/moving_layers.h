// Layers whose experts move, of every family of weights, and random placements for them.
#pragma once

#include "layer/coded_specs.h"
#include "layer/split_specs.h"
#include "support/layer_fixture.h"
#include "support/rank_grid.h"

#include "conclave/balance.h"
#include "conclave/checkpoint.h"
#include "conclave/comm.h"
#include "conclave/migration.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {

// E = 6, k = 2: families of packed weights, each with planes of its own.
inline std::vector<NamedSpec> weight_families() {
  const auto coded = [](DType type, const QuantSpec& quant) {
    return coded_spec(type, 6, 2, 96, 64, quant);
  };
  constexpr auto kBlock = WeightScale::kBlock;
  std::vector<NamedSpec> families = {
      {"F32", make_spec(6, 2, 40, 24, DType::kF32)},
      {"F16", make_spec(6, 2, 40, 24, DType::kF16)},
      {"BF16", make_spec(6, 2, 83, 45, DType::kBF16)},
      {"E4m3Blocks",
       coded(DType::kF8E4M3, {.weights = kBlock, .block_rows = 32, .block_cols = 32})},
      {"Int8Channel", coded(DType::kI8, {.weights = WeightScale::kChannel})},
      {"Int4Zeros",
       coded(DType::kI4,
             {.weights = kBlock, .block_rows = 1, .block_cols = 32, .zeros = WeightZero::kPoint})},
      {"Mxfp4", coded(DType::kF4, {.weights = kBlock, .block_rows = 1, .block_cols = 32})},
      {"Int4Order",
       coded(DType::kI4,
             {.weights = kBlock, .block_rows = 1, .block_cols = 32, .has_column_order = true})}};
  return families;
}

// Every expert once and the replicas of random ones, dealt to ranks that have room.
class SlotDealer {
 public:
  SlotDealer(int64_t experts, std::vector<int32_t> most, int32_t replicas, uint32_t seed)
      : experts_(experts), most_(std::move(most)), replicas_(replicas), random_(seed) {}

  ExpertSlots deal() {
    std::vector<int32_t> logical;
    for (int32_t e = 0; e < experts_; ++e) logical.push_back(e);
    for (int32_t r = 0; r < replicas_; ++r) {
      logical.push_back(draw(static_cast<int32_t>(experts_)));
    }
    std::ranges::shuffle(logical, random_);
    std::vector<std::vector<int32_t>> ranks(most_.size());
    for (const int32_t expert : logical) {
      auto rank = static_cast<size_t>(draw(static_cast<int32_t>(most_.size())));
      while (static_cast<int32_t>(ranks[rank].size()) == most_[rank]) {
        rank = (rank + 1) % most_.size();
      }
      ranks[rank].push_back(expert);
    }
    ExpertSlots slots{.num_experts = experts_, .first_of = {0}};
    for (const auto& rank : ranks) {
      slots.logical_of.insert(slots.logical_of.end(), rank.begin(), rank.end());
      slots.first_of.push_back(static_cast<int32_t>(slots.logical_of.size()));
    }
    return slots;
  }

 private:
  int32_t draw(int32_t below) {
    return std::uniform_int_distribution<int32_t>(0, below - 1)(random_);
  }

  int64_t experts_;
  std::vector<int32_t> most_;
  int32_t replicas_;
  std::mt19937 random_;
};

// Experts of each rank, in ascending order.
inline std::vector<std::vector<int32_t>> by_rank(const ExpertSlots& slots) {
  std::vector<std::vector<int32_t>> ranks;
  for (int32_t rank = 0; rank < slots.num_ranks(); ++rank) {
    const auto own = slots.of_rank(rank);
    ranks.emplace_back(own.begin(), own.end());
    std::ranges::sort(ranks.back());
  }
  return ranks;
}

// As many experts on each rank as a placement without spare places may have.
inline std::vector<int32_t> counts_of(int64_t experts, const ParallelSpec& parallel) {
  std::vector<int32_t> counts;
  for (const auto& rank : by_rank(slots_of(experts, parallel))) {
    counts.push_back(static_cast<int32_t>(rank.size()));
  }
  return counts;
}

// Communicators for migrations beside forwards: [tp_rank][ep_rank].
class SecondGroups {
 public:
  SecondGroups(int32_t ep_size, int32_t tp_size,
               std::chrono::nanoseconds timeout = std::chrono::seconds(60)) {
    for (int32_t tp = 0; tp < tp_size; ++tp) {
      groups_.push_back(make_local_group({.num_ranks = ep_size, .timeout = timeout}));
    }
  }
  std::unique_ptr<Communicator>& of(const GridRank& rank) {
    return groups_[static_cast<size_t>(rank.tp_rank)][static_cast<size_t>(rank.ep_rank)];
  }

 private:
  std::vector<std::vector<std::unique_ptr<Communicator>>> groups_;
};

inline Tensor forward(const MoeLayer& layer, const Tensor& hidden) {
  return run_layer(layer, hidden.view(), DType::kBF16).out;
}

}  // namespace conclave::testing
