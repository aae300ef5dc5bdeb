// An engine does this for a refit: packs weights beside those that forwards read, or over them, and
// makes them the layer's.
#pragma once

#include "layer/refit/forward_gate.h"
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
  ForwardGate& gate;  // open
  bool keeps_memory = false;
  std::vector<int32_t> places = {};  // the expert in each place of this rank, -1 for a free one
};

struct StageCall {
  const WeightSource& source;                       // checked
  const RefitUnits& units;                          // within the scope
  Executor* executor = nullptr;                     // null: what the engine prefers
  const std::function<void()>& before_overwriting;  // called before weights of the layer are
};

class EngineRefit {
 public:
  virtual ~EngineRefit() = default;
  // Throws what the source throws, and for values. May be called again for the same units.
  virtual void stage(const StageCall& call) = 0;
  // All of the scope is staged; ranks are asked next. Throws where this one cannot go on.
  virtual void prepare() {}
  // No forward is under way. What the layer had goes with this object. Throws only if the device
  // has failed.
  virtual void publish() = 0;
  // Forwards are on again. Returns when nothing reads what is staged any more, and throws likewise.
  virtual void settle() {}
};

}  // namespace conclave::inline v0
