// Tensor maps of weights and rows as the grouped products read them. Boxes are 128 bytes of K wide,
// 128-byte swizzled, but for those of weights that a kernel decodes, which may have half as many.
#pragma once

#include "experts/cuda/device_experts.h"

#include <cstdint>
#include <cuda.h>
#include <optional>

namespace conclave::inline v0::experts {

inline constexpr uint32_t kBoxBytes = 128;
inline constexpr uint32_t kHalfBoxBytes = 64;

// The type of elements in a map: codes are bytes.
CUtensorMapDataType map_type(DType dtype);

// {K, 8 rows, gate and up, groups of 8 rows, E}: a box holds 8 gate rows, 8 up rows, 8 gate
// rows..., `box_rows` in all, so that a thread's accumulators hold both gate and up of a feature.
// The last group of rows may reach into what follows the gate; those features are not stored.
CUtensorMap map_gated_weights(const ExpertsProblem& sizes, const DeviceExperts& weights,
                              int32_t box_rows, uint32_t box_bytes = kBoxBytes);

// {K, rows, E}; rows and columns beyond the sizes read as zeros.
struct WeightMatrix {
  const void* data = nullptr;
  int64_t stride = 0;  // elements
  int64_t rows = 0;
  int64_t depth = 0;
};
CUtensorMap map_weights(const ExpertsProblem& sizes, const WeightMatrix& matrix, int32_t box_rows,
                        uint32_t box_bytes = kBoxBytes);

// {columns, rows}, in the type of the weights if no other is given.
struct RowMatrix {
  const void* data = nullptr;
  int64_t stride = 0;  // elements
  int64_t rows = 0;
  int64_t columns = 0;
  std::optional<DType> dtype = {};
};
CUtensorMap map_rows(const ExpertsProblem& sizes, const RowMatrix& matrix, int32_t box_rows);

// {rows, parts, groups of columns, E} of scales or zero points, not swizzled; a box has `box_rows`
// rows over all parts.
struct FactorNumbers {
  const void* data = nullptr;
  DType dtype = DType::kF32;
};
CUtensorMap map_factors(const ExpertsProblem& sizes, const FactorPlanes& planes,
                        const FactorNumbers& numbers, int32_t box_rows, int32_t box_groups);

// {rows, parts, words of steps or units along the columns, E}, likewise.
CUtensorMap map_step_words(const ExpertsProblem& sizes, const FactorPlanes& planes,
                           int32_t box_rows, int32_t box_words);
CUtensorMap map_step_units(const ExpertsProblem& sizes, const FactorPlanes& planes,
                           int32_t box_rows, int32_t box_units);

// {rows of kernels, groups of columns, E} of FactorForm::kExact, likewise.
CUtensorMap map_exact_scales(const ExpertsProblem& sizes, const FactorPlanes& planes,
                             int32_t box_rows, int32_t box_groups);

}  // namespace conclave::inline v0::experts
