// Parts of a layer's weights that are packed together, and so change together: gate and up of an
// expert, its down, each weight of the layer itself. Named by expert, alike on every rank.
#pragma once

#include "conclave/refit.h"
#include "conclave/spec.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace conclave::inline v0 {

class RefitUnits {
 public:
  explicit RefitUnits(int64_t num_experts);

  // `id` is any plane of the unit's matrices. `expert` counts for routed experts alone.
  bool has(WeightId id, int64_t expert) const { return bits_[index(id, expert)]; }
  bool has_any(WeightId id) const;  // true if any expert has
  bool covers(const RefitUnits& other) const;
  void add(WeightId id, int64_t expert) { bits_[index(id, expert)] = true; }
  void add(const RefitUnits& other);
  void remove(const RefitUnits& other);

  // For messages: "down of expert 5"; a unit of `wanted` that is not here, or nothing.
  std::string first_missing(const RefitUnits& wanted) const;
  int64_t key() const;  // equal for equal units, from 0 to 2^62

 private:
  size_t index(WeightId id, int64_t expert) const;

  int64_t num_experts_;
  std::vector<bool> bits_;
};

// Throws Error(kInvalidArgument) for experts and tensors that a layer of this spec does not have.
RefitUnits units_of(const MoeSpec& spec, const RefitScope& scope);
RefitUnits all_units(const MoeSpec& spec);

// Works as check_source, for the units alone.
void check_source_of(const MoeSpec& spec, const WeightSource& source, const RefitUnits& units);

}  // namespace conclave::inline v0
