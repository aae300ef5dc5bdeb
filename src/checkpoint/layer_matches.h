// The meanings of a layer's tensors, by their names alone.
#pragma once

#include "checkpoint/layer_names.h"
#include "checkpoint/layer_view.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

struct TensorMatch {
  NameMatch name;
  int32_t tensor = 0;
  // The plane of the matrix that the name means, or none: the tensor itself.
  std::optional<WeightPlane> plane = std::nullopt;
  // Set if the quantisation's method stores the tensor in a way of its own.
  const StoredPlane* row = nullptr;
};

struct LayerMatches {
  std::vector<TensorMatch> tensors;
  std::vector<int32_t> strays;  // tensors of the MoE block whose names no pattern knows
  std::string foreign;  // a matrix that must not be quantised but is, or whose form is not read
  uint64_t bytes = 0;   // the sum over all tensors but strays and foreign scales
};
LayerMatches match_tensors(const LayerView& view);

}  // namespace conclave::inline v0::checkpoint
