// Random weights that are drawn once, for tests that read them often.
#pragma once

#include "conclave/spec.h"
#include "conclave/weights.h"

#include <cstdint>
#include <memory>

namespace conclave::testing {

// Gives what make_synthetic_source gives. The matrices of a layer of up to 16 MiB are drawn here:
// the layer and each check of it read them again, and drawing took a third of such a test. Later
// reads copy without a lock, so that threads meet nowhere where they did not before.
std::unique_ptr<WeightSource> draw_source(const MoeSpec& spec, uint64_t seed);

}  // namespace conclave::testing
