// Names of the planes of codes, derived from the name of the matrix they belong to by one rule for
// every family.
#pragma once

#include "checkpoint/layer_names.h"
#include "checkpoint/layer_shapes.h"
#include "checkpoint/stored_planes.h"

#include "conclave/weights.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

// The matrix that the name of a scale may belong to: "w1.weight" for "w1.weight_scale_inv",
// "experts.down_proj" for "experts.down_proj_scale". Several readings are possible.
struct ScaleName {
  std::string matrix;
  WeightPlane plane = WeightPlane::kScale;
};
std::vector<ScaleName> scale_names(std::string_view name);

// The way back: all usual names of a plane.
std::vector<std::string> usual_names(std::string_view matrix, WeightPlane plane);

// The usual name of a scale, for messages about what is missing.
std::string usual_scale_name(std::string_view matrix, WeightPlane plane, std::string_view method);

// Whether the tensor may be quantised: matrices of experts and shared experts.
bool is_quantisable(Part part);
// The ids that a tensor fills, one for each matrix of the part: those of the part itself, or of a
// plane of its matrices.
std::vector<WeightId> ids_of(Part part, std::optional<WeightPlane> plane);

// Whether matrices that are fused in one tensor have the plane in common.
bool is_common(const quant::PlaneShape& plane);

struct ScaleMatch {
  NameMatch name;  // the name of the matrix
  WeightPlane plane = WeightPlane::kScale;
  const StoredPlane* row = nullptr;  // set if the method stores the plane in a way of its own
};
// The plane that a name after "layers.N." stands for, among those that a layer with these shapes
// has. Names of the quantisation's method come before those that are usual.
std::optional<ScaleMatch> match_scale_name(const Architecture& architecture,
                                           const std::optional<QuantizedWeights>& quant,
                                           const LayerShapes& shapes, std::string_view rest);
// The use of a name, if it is one of a matrix's tensors that hold none of its planes.
std::optional<StoredPlane::Use> match_aid(const Architecture& architecture,
                                          const std::optional<QuantizedWeights>& quant,
                                          const LayerShapes& shapes, std::string_view rest);

}  // namespace conclave::inline v0::checkpoint
