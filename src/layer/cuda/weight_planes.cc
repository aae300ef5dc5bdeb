#include "layer/cuda/weight_planes.h"

#include "core/weight_types.h"

namespace conclave::inline v0 {

ExpertPlane matrix_plane(const MlpSource& mlp, const CudaMlpWeights& weights, MlpHalf half) {
  const bool is_down = half == MlpHalf::kDown;
  const experts::DeviceExpertMatrix& view = is_down ? weights.view.down : weights.view.gate_up;
  const int64_t rows = is_down ? mlp.problem.hidden_size : mlp.gate_up_rows();
  return {.data = weights.of(half).data.as(),
          .bytes = static_cast<size_t>(rows * packed_bytes(mlp.problem.weight_dtype, view.stride))};
}

std::vector<ExpertPlane> planes_of(const MlpSource& mlp, const CudaMlpWeights& weights,
                                   MlpHalf half) {
  std::vector<ExpertPlane> planes;
  if (mlp.places() == 0) return planes;
  if (const ExpertPlane matrix = matrix_plane(mlp, weights, half); matrix.data != nullptr) {
    planes.push_back(matrix);
  }
  const auto add = [&](const DeviceMemory& memory) {
    if (memory.empty()) return;
    planes.push_back(
        {.data = memory.as(), .bytes = memory.bytes() / static_cast<size_t>(mlp.places())});
  };
  const CudaMatrixMemory& memory = weights.of(half);
  for (const DeviceMemory* plane :
       {&memory.bias, &memory.scale, &memory.offset, &memory.factor_scale, &memory.sum_factor,
        &memory.step_units, &memory.factor_zero, &memory.factor_offset}) {
    add(*plane);
  }
  if (half == MlpHalf::kDown) {
    add(weights.column_factors);
    add(weights.inner_columns);
  } else {
    add(weights.own_rows.columns);
    add(weights.own_rows.factors);
  }
  return planes;
}

}  // namespace conclave::inline v0
