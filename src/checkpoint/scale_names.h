// Names of scales, derived from the name of the matrix they belong to by one rule for every family.
#pragma once

#include "checkpoint/layer_names.h"

#include "conclave/spec.h"
#include "conclave/weights.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

enum class TensorKind : uint8_t {
  kPlain,       // the tensor that its pattern names
  kScale,       // the scales of the matrix that its pattern names
  kInputScale,  // the scale of the rows that this matrix multiplies
};

// The matrix that the name of a scale may belong to: "w1.weight" for "w1.weight_scale_inv",
// "experts.down_proj" for "experts.down_proj_scale". Several readings are possible.
struct ScaleName {
  std::string matrix;
  TensorKind kind = TensorKind::kScale;
};
std::vector<ScaleName> scale_names(std::string_view name);

// The usual name of a scale, for messages about what is missing.
std::string usual_scale_name(std::string_view matrix, TensorKind kind, std::string_view method);

// Whether the tensor may be quantised: matrices of experts and shared experts.
bool is_quantisable(Part part);
bool is_scale_role(WeightRole role);
// The roles that a tensor of the kind fills, one for each that the part has.
std::vector<WeightRole> roles_of(Part part, TensorKind kind);

struct ScaleMatch {
  NameMatch name;  // the name of the matrix
  TensorKind kind = TensorKind::kScale;
};
// The scale that a name after "layers.N." stands for, among those that a layer with this spec has.
std::optional<ScaleMatch> match_scale_name(const Architecture& architecture, const MoeSpec& spec,
                                           std::string_view rest);

}  // namespace conclave::inline v0::checkpoint
