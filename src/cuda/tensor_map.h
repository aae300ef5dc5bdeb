// Descriptors of the tensor copy engine (TMA). Made on the host, passed by value to kernels.
#pragma once

#include <cstdint>
#include <cuda.h>
#include <span>

namespace conclave::inline v0::cuda {

enum class Swizzle : uint8_t { kNone, k32, k64, k128 };

// One dimension of a tensor and of the box that a copy moves; the first is contiguous.
struct MapDimension {
  uint64_t size = 1;          // elements; a copy reads zeros beyond it
  uint64_t stride_bytes = 0;  // multiple of 16; unused for the first dimension
  uint32_t box = 1;           // 1 to 256 elements
};

struct TensorMapSpec {
  const void* data = nullptr;  // 16-byte aligned
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  std::span<const MapDimension> dimensions;  // 1 to 5
  Swizzle swizzle = Swizzle::k128;
};

// Throws Error(kDevice) with the driver's verdict. Takes about a microsecond and allocates nothing.
CUtensorMap make_tensor_map(const TensorMapSpec& spec);

}  // namespace conclave::inline v0::cuda
