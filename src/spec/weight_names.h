// The parts of weights' names.
#pragma once

#include "conclave/weights.h"

#include <string_view>

namespace conclave::inline v0 {

std::string_view prefix_of(WeightMlp mlp);      // "", "shared_"
std::string_view suffix_of(WeightPlane plane);  // "", "_scale"

}  // namespace conclave::inline v0
