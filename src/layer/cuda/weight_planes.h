// The parts of device memory that belong to one half of an expert: its matrix, and what gives codes
// a meaning. They lie alike for every expert of an MLP, one behind the other.
#pragma once

#include "layer/cuda/mlp_source.h"
#include "layer/cuda/weights.h"

#include <cstddef>
#include <vector>

namespace conclave::inline v0 {

struct ExpertPlane {
  std::byte* data = nullptr;  // where the expert at place 0 begins
  size_t bytes = 0;           // each expert has so many

  std::byte* at(int64_t place) const { return data + static_cast<size_t>(place) * bytes; }
};

// The matrix is empty if it is used where its source has it.
ExpertPlane matrix_plane(const MlpSource& mlp, const CudaMlpWeights& weights, MlpHalf half);
// `weights` have as many places as `mlp`. Empty ones are left out.
std::vector<ExpertPlane> planes_of(const MlpSource& mlp, const CudaMlpWeights& weights,
                                   MlpHalf half);

}  // namespace conclave::inline v0
