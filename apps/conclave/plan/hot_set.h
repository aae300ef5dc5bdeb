// Whether a model has a hot set: experts that keep getting more than their part of the choices.
#pragma once

#include "plan/layer_load.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::tool {

enum class HotSetVerdict : uint8_t {
  kUnknown,  // too few choices to tell
  kNone,
  kMild,
  kHot,
};

// The eighth of a layer's experts that is hottest in the first half of a trace, and by how much its
// part of the choices in the second half exceeds an eighth: 1 where load is even. The eighth is
// chosen by other tokens than it is measured by, so that chance alone does not make it hot.
double hot_lift(const LayerLoad& load);
// The part of the experts that is asked for: an eighth, one at least.
int64_t hot_experts(int64_t num_experts);

struct HotSet {
  HotSetVerdict verdict = HotSetVerdict::kUnknown;
  std::vector<double> lifts;  // one for each layer
  double mean_lift = 1;
  int64_t hot_layers = 0;  // whose lift is kHotLift or more
  std::string text;        // the verdict as a sentence
};

// A mean lift below kMildLift is none, unless a layer has kHotLift; from that on the model is hot.
inline constexpr double kMildLift = 1.25;
inline constexpr double kHotLift = 1.5;
// With fewer choices for each expert in a half, the hottest of it are hottest by chance.
inline constexpr double kLeastChoices = 8;

HotSet judge_hot_set(std::vector<double> lifts, const TraceInfo& trace);

}  // namespace conclave::tool
