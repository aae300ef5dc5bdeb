// Puts the tensors of a layer in their places: its matrices and the planes of their codes.
#pragma once

#include "checkpoint/layer_layout.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

// The matrices and planes that have come, and where they lie.
struct LayerPlanes {
  WeightTable<std::vector<MatrixLocation>> slots;  // by expert; empty if none of them has come
  std::vector<PlaneReading> readings;
  std::vector<std::string> missing_inputs;  // names of what readings need and the layer lacks
  bool transposed = false;                  // whether an expert tensor is stored columns first

  bool has(WeightId id, int64_t expert) const;
  bool has_all(std::span<const WeightId> ids, int64_t expert) const;
  // Whether some tensor of the matrix, or of a plane of it, is there.
  bool has_any_of(WeightId matrix, int64_t expert) const;
  const MatrixLocation* first(WeightId id) const;  // null without one
  // Says what its tensor holds.
  DType type_of(const TensorTable& table, const MatrixLocation& location) const;
};

// Throws Error(kTensorDuplicate, kTensorShape, kTensorDType, kTensorUnexpected for an expert number
// >= E, kUnsupportedQuantization).
LayerPlanes place_tensors(const LayerView& view, const LayerLayout& layout,
                          std::span<const TensorMatch> matches);

}  // namespace conclave::inline v0::checkpoint
