// What an engine does for a refit: packs weights beside those that forwards read, or over them, and
// makes them the layer's.
#pragma once

#include "layer/refit/refit_units.h"

#include "conclave/context.h"
#include "conclave/refit.h"
#include "conclave/weights.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace conclave::inline v0 {

struct RefitRequest {
  RefitMode mode = RefitMode::kStaged;
  const RefitUnits& scope;
  bool keeps_memory = false;
  std::vector<int32_t> places = {};  // the expert in each place of this rank, -1 for a free one
};

struct StageCall {
  const WeightSource& source;  // checked
  const RefitUnits& units;     // within the scope
  Executor& executor;
  const std::function<void()>& before_overwriting;  // called before weights of the layer are
};

class EngineRefit {
 public:
  virtual ~EngineRefit() = default;
  // Throws what the source throws, and for values. May be called again for the same units.
  virtual void stage(const StageCall& call) = 0;
  // All of the scope is staged, and no forward is under way. What the layer had goes with this
  // object.
  virtual void publish() noexcept = 0;
};

}  // namespace conclave::inline v0
