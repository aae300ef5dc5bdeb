// Every weight matrix of a layer with a given spec: one list for all who need it.
#pragma once

#include "conclave/weights.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

enum class RoleDType : uint8_t {
  kWeight,    // packed by a kernel as LayerRole::weight_dtype
  kAnyFloat,  // f32, f16 or bf16
  kScale,     // belongs to a quantised matrix: f32, f16, bf16 or e8m0
  kIndex,     // int32 or int64
};

struct LayerRole {
  WeightRole role = WeightRole::kGate;
  int64_t count = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  RoleDType dtype = RoleDType::kAnyFloat;
  bool optional = false;
  DType weight_dtype = DType::kF32;  // for kWeight
};

// Ordered as WeightRole.
std::vector<LayerRole> layer_roles(const MoeSpec& spec);

// Rows and columns of the scales of a matrix of codes [rows, cols].
struct ScaleShape {
  int64_t rows = 0;
  int64_t cols = 0;
};
ScaleShape scale_shape(const QuantSpec& quant, int64_t rows, int64_t cols);

// The activation of the shared experts and of the residual MLP: `own`, or the routed experts' if
// `own` has no name.
const ActivationSpec& activation_or_routed(const ActivationSpec& own, const MoeSpec& spec);

// count_parameters for any spec whose sizes are in range, valid or not, so that a layer that does
// not run can still be listed. Throws Error(kSizeOverflow).
ParameterCount count_weights(const MoeSpec& spec);

}  // namespace conclave::inline v0
