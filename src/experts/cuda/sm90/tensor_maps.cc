#include "experts/cuda/sm90/tensor_maps.h"

#include "core/checked.h"
#include "core/weight_types.h"
#include "cuda/tensor_map.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/lane_codes.h"

#include <array>
#include <span>

namespace conclave::inline v0::experts {
namespace {

using cuda::MapDimension;

// Columns of K: codes are bytes of them.
MapDimension columns(int64_t size, DType dtype, uint32_t box_bytes) {
  const int64_t bytes = is_plain(dtype) ? byte_size(dtype) : 1;
  return {.size = static_cast<uint64_t>(packed_bytes(dtype, size) / bytes),
          .box = box_bytes / static_cast<uint32_t>(bytes)};
}

MapDimension weight_columns(const ExpertsProblem& sizes, int64_t count, uint32_t box_bytes) {
  return columns(stored_columns(sizes, count), sizes.weight_dtype, box_bytes);
}

uint64_t pitch(int64_t stride, DType dtype) {
  return static_cast<uint64_t>(packed_bytes(dtype, stride));
}

CUtensorMap make_map(const void* data, DType dtype, std::span<const MapDimension> dimensions,
                     uint32_t box_bytes) {
  return cuda::make_tensor_map(
      {.data = data,
       .type = map_type(dtype),
       .dimensions = dimensions,
       .swizzle = box_bytes == kHalfBoxBytes ? cuda::Swizzle::k64 : cuda::Swizzle::k128});
}

// Each row of each part has so many of these along the columns.
struct OfRows {
  const void* data = nullptr;
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  int64_t bytes = 0;  // each
  int64_t count = 0;
};

CUtensorMap map_of_rows(const ExpertsProblem& sizes, const FactorPlanes& planes, const OfRows& own,
                        int32_t box_rows, int32_t box_count) {
  const auto part = static_cast<uint64_t>(planes.row_stride * own.bytes);
  const auto parts = static_cast<uint64_t>(planes.parts);
  const auto count = static_cast<uint64_t>(own.count);
  const std::array dimensions = {
      MapDimension{.size = static_cast<uint64_t>(planes.rows),
                   .box = static_cast<uint32_t>(box_rows) / static_cast<uint32_t>(parts)},
      MapDimension{.size = parts, .stride_bytes = part, .box = static_cast<uint32_t>(parts)},
      MapDimension{
          .size = count, .stride_bytes = parts * part, .box = static_cast<uint32_t>(box_count)},
      MapDimension{.size = static_cast<uint64_t>(sizes.num_local_experts),
                   .stride_bytes = count * parts * part}};
  return cuda::make_tensor_map({.data = own.data,
                                .type = own.type,
                                .dimensions = dimensions,
                                .swizzle = cuda::Swizzle::kNone});
}

}  // namespace

CUtensorMapDataType map_type(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kF32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

CUtensorMap map_gated_weights(const ExpertsProblem& sizes, const DeviceExperts& weights,
                              int32_t box_rows, uint32_t box_bytes) {
  const DType dtype = sizes.weight_dtype;
  const uint64_t row = pitch(weights.gate_up.stride, dtype);
  const auto rows = static_cast<uint64_t>(sizes.intermediate_size);
  const std::array dimensions = {
      weight_columns(sizes, sizes.input_columns(), box_bytes),
      MapDimension{.size = 8, .stride_bytes = row, .box = 8},
      MapDimension{.size = 2, .stride_bytes = rows * row, .box = 2},
      MapDimension{.size = (rows + 7) / 8,
                   .stride_bytes = 8 * row,
                   .box = static_cast<uint32_t>(box_rows) / 16},
      MapDimension{.size = static_cast<uint64_t>(sizes.num_local_experts),
                   .stride_bytes = 2 * rows * row}};
  return make_map(weights.gate_up.data, dtype, dimensions, box_bytes);
}

CUtensorMap map_weights(const ExpertsProblem& sizes, const WeightMatrix& matrix, int32_t box_rows,
                        uint32_t box_bytes) {
  const DType dtype = sizes.weight_dtype;
  const uint64_t row = pitch(matrix.stride, dtype);
  const auto rows = static_cast<uint64_t>(matrix.rows);
  const std::array dimensions = {
      weight_columns(sizes, matrix.depth, box_bytes),
      MapDimension{.size = rows, .stride_bytes = row, .box = static_cast<uint32_t>(box_rows)},
      MapDimension{.size = static_cast<uint64_t>(sizes.num_local_experts),
                   .stride_bytes = rows * row}};
  return make_map(matrix.data, dtype, dimensions, box_bytes);
}

CUtensorMap map_rows(const ExpertsProblem& sizes, const RowMatrix& matrix, int32_t box_rows) {
  const DType dtype = matrix.dtype.value_or(sizes.weight_dtype);
  const std::array dimensions = {columns(matrix.columns, dtype, kBoxBytes),
                                 MapDimension{.size = static_cast<uint64_t>(matrix.rows),
                                              .stride_bytes = pitch(matrix.stride, dtype),
                                              .box = static_cast<uint32_t>(box_rows)}};
  return make_map(matrix.data, dtype, dimensions, kBoxBytes);
}

CUtensorMap map_factors(const ExpertsProblem& sizes, const FactorPlanes& planes,
                        const FactorNumbers& numbers, int32_t box_rows, int32_t box_groups) {
  return map_of_rows(sizes, planes,
                     {.data = numbers.data,
                      .type = map_type(numbers.dtype),
                      .bytes = byte_size(numbers.dtype),
                      .count = planes.groups},
                     box_rows, box_groups);
}

CUtensorMap map_step_words(const ExpertsProblem& sizes, const FactorPlanes& planes,
                           int32_t box_rows, int32_t box_words) {
  const FactorForm form = factor_form(sizes);
  const int32_t bytes = bytes_of_step_word(form);
  return map_of_rows(
      sizes, planes,
      {.data = planes.steps,
       .type = bytes == 4 ? CU_TENSOR_MAP_DATA_TYPE_UINT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
       .bytes = bytes,
       .count = step_words(form, planes.groups)},
      box_rows, box_words);
}

CUtensorMap map_step_units(const ExpertsProblem& sizes, const FactorPlanes& planes,
                           int32_t box_rows, int32_t box_units) {
  const int32_t bytes = bytes_of_step_unit(factor_form(sizes));
  return map_of_rows(
      sizes, planes,
      {.data = planes.step_units,
       .type = bytes == 8 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT64 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
       .bytes = bytes,
       .count = planes.units},
      box_rows, box_units);
}

CUtensorMap map_exact_scales(const ExpertsProblem& sizes, const FactorPlanes& planes,
                             int32_t box_rows, int32_t box_groups) {
  const auto stride = static_cast<uint64_t>(planes.byte_stride);
  const auto groups = static_cast<uint64_t>(planes.groups);
  const std::array dimensions = {
      MapDimension{.size = stride, .box = static_cast<uint32_t>(box_rows)},
      MapDimension{
          .size = groups, .stride_bytes = stride, .box = static_cast<uint32_t>(box_groups)},
      MapDimension{.size = static_cast<uint64_t>(sizes.num_local_experts),
                   .stride_bytes = groups * stride}};
  return cuda::make_tensor_map({.data = planes.bytes,
                                .type = CU_TENSOR_MAP_DATA_TYPE_UINT8,
                                .dimensions = dimensions,
                                .swizzle = cuda::Swizzle::kNone});
}

}  // namespace conclave::inline v0::experts
