// A budget of experts for a batch: which of the experts that its tokens have chosen may stay.
#pragma once

#include "conclave/routing.h"

#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0::routing {

// Sums of routing weights of each expert, exact to 2^-40 whatever the order of tokens, chunks and
// ranks. Words of several ranks are added up one by one.
class ExpertWeightSums {
 public:
  explicit ExpertWeightSums(int64_t num_experts);

  // Adds the slots that name an expert below E. Weights that are not finite, or beyond 2^20, count
  // as 0, or as that bound.
  void add(const Routing& routing);

  std::span<int64_t> words() { return words_; }
  int64_t num_used() const;
  // [E + Z] flags: nonzero for experts that the budget leaves out. The `budget` experts with the
  // largest sums stay, of equal ones the lower id; zero experts always do.
  std::vector<uint8_t> left_out(int64_t budget, int64_t num_zero_experts) const;

 private:
  // A sum is high * 2^31 + low, in units of 2^-40; `slots` tells an expert that nobody chose.
  int64_t& high(int64_t expert) { return words_[static_cast<size_t>(3 * expert)]; }
  int64_t& low(int64_t expert) { return words_[static_cast<size_t>(3 * expert + 1)]; }
  int64_t& slots(int64_t expert) { return words_[static_cast<size_t>(3 * expert + 2)]; }

  int64_t num_experts_;
  std::vector<int64_t> words_;
};

}  // namespace conclave::inline v0::routing
