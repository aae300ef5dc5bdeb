#include "experts/cuda/sm90/tensor_maps.h"

#include "cuda/tensor_map.h"

#include <array>
#include <span>

namespace conclave::inline v0::experts {
namespace {

using cuda::MapDimension;

constexpr uint32_t kBoxBytes = 128;

struct Element {
  CUtensorMapDataType type;
  uint64_t bytes;
};

Element element_of(DType dtype) {
  return {map_type(dtype), static_cast<uint64_t>(byte_size(dtype))};
}

MapDimension columns(int64_t size, const Element& element) {
  return {.size = static_cast<uint64_t>(size),
          .box = kBoxBytes / static_cast<uint32_t>(element.bytes)};
}

CUtensorMap make_map(const void* data, const Element& element,
                     std::span<const MapDimension> dimensions) {
  return cuda::make_tensor_map({.data = data, .type = element.type, .dimensions = dimensions});
}

}  // namespace

CUtensorMapDataType map_type(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

CUtensorMap map_gated_weights(const ExpertsProblem& sizes, const DeviceExperts& weights,
                              int32_t box_rows) {
  const Element element = element_of(sizes.weight_dtype);
  const uint64_t row = static_cast<uint64_t>(weights.gate_up.stride) * element.bytes;
  const auto rows = static_cast<uint64_t>(sizes.intermediate_size);
  const std::array dimensions = {
      columns(sizes.hidden_size, element), MapDimension{.size = 8, .stride_bytes = row, .box = 8},
      MapDimension{.size = 2, .stride_bytes = rows * row, .box = 2},
      MapDimension{.size = (rows + 7) / 8,
                   .stride_bytes = 8 * row,
                   .box = static_cast<uint32_t>(box_rows) / 16},
      MapDimension{.size = static_cast<uint64_t>(sizes.num_local_experts),
                   .stride_bytes = 2 * rows * row}};
  return make_map(weights.gate_up.data, element, dimensions);
}

CUtensorMap map_weights(const ExpertsProblem& sizes, const WeightMatrix& matrix, int32_t box_rows) {
  const Element element = element_of(sizes.weight_dtype);
  const uint64_t row = static_cast<uint64_t>(matrix.stride) * element.bytes;
  const auto rows = static_cast<uint64_t>(matrix.rows);
  const std::array dimensions = {
      columns(matrix.depth, element),
      MapDimension{.size = rows, .stride_bytes = row, .box = static_cast<uint32_t>(box_rows)},
      MapDimension{.size = static_cast<uint64_t>(sizes.num_local_experts),
                   .stride_bytes = rows * row}};
  return make_map(matrix.data, element, dimensions);
}

CUtensorMap map_rows(const ExpertsProblem& sizes, const RowMatrix& matrix, int32_t box_rows) {
  const Element element = element_of(sizes.weight_dtype);
  const std::array dimensions = {
      columns(matrix.columns, element),
      MapDimension{.size = static_cast<uint64_t>(matrix.rows),
                   .stride_bytes = static_cast<uint64_t>(matrix.stride) * element.bytes,
                   .box = static_cast<uint32_t>(box_rows)}};
  return make_map(matrix.data, element, dimensions);
}

}  // namespace conclave::inline v0::experts
