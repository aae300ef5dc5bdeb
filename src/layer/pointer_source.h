// A source over raw pointers, of a whole layer or of the part of one that a refit takes.
#pragma once

#include "conclave/weights.h"

#include <cstdint>
#include <memory>

namespace conclave::inline v0 {

enum class GivenTensors : uint8_t {
  kWhole,  // gate_up and down are needed
  kPart,   // anything may be left out
};

// Works as the public make_pointer_source (conclave/weights.h).
std::unique_ptr<WeightSource> make_pointer_source(const ExpertWeights& weights, GivenTensors given);

}  // namespace conclave::inline v0
