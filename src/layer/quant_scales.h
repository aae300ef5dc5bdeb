// Scales of matrices of codes and of the rows they multiply: read from a source, checked, widened.
#pragma once

#include "conclave/error.h"
#include "conclave/spec.h"
#include "conclave/weights.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

// Loads a block of a plane of scales as float32, dense. Throws Error(kTensorValue) naming the
// tensor for a scale that is NaN or infinite, or negative where they have no signs.
std::vector<float> load_scales(const QuantSpec& quant, const WeightSource& source, WeightId id,
                               int64_t expert, const WeightBlock& block);
// Loads all scales of a matrix.
std::vector<float> load_scales(const QuantSpec& quant, const WeightSource& source, WeightId id,
                               int64_t expert);

// Loads for each row of a block of the matrix the scales of its columns: [rows, 1], or with
// WeightScale::kBlock one for each block of scales that these touch.
std::vector<float> load_row_scales(const QuantSpec& quant, const WeightSource& source,
                                   WeightId matrix, int64_t expert, const WeightBlock& block);

// The steps of ActivationScale::kTensorStatic for all experts of a kind: the largest over experts,
// and over gate and up. Throws Error(kTensorValue) for one that is not finite and positive.
struct StaticScales {
  float input = 1;
  float intermediate = 1;
};
StaticScales load_static_scales(const WeightSource& source, WeightMlp mlp);

}  // namespace conclave::inline v0
