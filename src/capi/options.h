// Options and splits of layers as the library has them.
#pragma once

#include "conclave/c/layer.h"
#include "conclave/layer.h"
#include "conclave/spec.h"

namespace conclave::inline v0::capi {

// NULL is the default. Throw Error naming the field, and what a tuning table's file breaks.
LayerOptions options_of(const conclave_layer_options* options);
ParallelSpec parallel_of(const conclave_parallel* parallel);

}  // namespace conclave::inline v0::capi
