// A number for each expert-parallel rank whose rows gather on a device, in memory of its own: a
// forward allocates nothing.
#pragma once

#include "conclave/version.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>

namespace conclave::inline v0 {

// A group of NCCL has no more: so many ranks say what they mean in one launch.
inline constexpr int32_t kMostGatheringRanks = 129;

class RankCounts {
 public:
  RankCounts() = default;
  explicit RankCounts(int32_t ranks) : ranks_(static_cast<size_t>(ranks)) {}

  int64_t& operator[](int32_t rank) { return counts_[static_cast<size_t>(rank)]; }
  int64_t operator[](int32_t rank) const { return counts_[static_cast<size_t>(rank)]; }
  std::span<int64_t> all() { return std::span(counts_).first(ranks_); }
  std::span<const int64_t> all() const { return std::span(counts_).first(ranks_); }
  int32_t ranks() const { return static_cast<int32_t>(ranks_); }
  int64_t sum() const { return sum_before(ranks()); }
  // That of the ranks below `rank`.
  int64_t sum_before(int32_t rank) const {
    return std::accumulate(counts_.begin(), counts_.begin() + rank, int64_t{0});
  }

 private:
  size_t ranks_ = 0;
  std::array<int64_t, kMostGatheringRanks> counts_{};
};

}  // namespace conclave::inline v0
