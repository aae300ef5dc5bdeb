#include "cuda/tensor_map.h"

#include "cuda/check.h"

#include "conclave/error.h"

#include <array>
#include <cstddef>
#include <cuda_runtime_api.h>
#include <string>

namespace conclave::inline v0::cuda {
namespace {

constexpr size_t kMaxDimensions = 5;

// 256 bytes would cost a weight stream with boxes of 128-byte rows 6 to 10 % on an H200
// (bench/results/h200/LOG.md).
constexpr CUtensorMapL2promotion kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Goes through the runtime, so that nothing links libcuda.
EncodeTiled find_encode_tiled() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kSinceVersion = 12000;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kSinceVersion,
                                         cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess || entry == nullptr) {
    throw Error(ErrorCode::kDevice, {.what = "the driver lacks cuTensorMapEncodeTiled",
                                     .hint = "install a driver for CUDA 12 or newer"});
  }
  return reinterpret_cast<EncodeTiled>(entry);
}

CUtensorMapSwizzle to_driver(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::kNone:
      return CU_TENSOR_MAP_SWIZZLE_NONE;
    case Swizzle::k32:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    case Swizzle::k64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    case Swizzle::k128:
      break;
  }
  return CU_TENSOR_MAP_SWIZZLE_128B;
}

}  // namespace

CUtensorMap make_tensor_map(const TensorMapSpec& spec) {
  static const EncodeTiled encode_tiled = find_encode_tiled();
  const size_t rank = spec.dimensions.size();
  std::array<cuuint64_t, kMaxDimensions> sizes{};
  std::array<cuuint64_t, kMaxDimensions> strides{};
  std::array<cuuint32_t, kMaxDimensions> box{};
  std::array<cuuint32_t, kMaxDimensions> steps{};
  for (size_t i = 0; i < rank; ++i) {
    sizes[i] = spec.dimensions[i].size;
    box[i] = spec.dimensions[i].box;
    steps[i] = 1;
    if (i > 0) strides[i - 1] = spec.dimensions[i].stride_bytes;
  }
  CUtensorMap map{};
  const CUresult status = encode_tiled(
      &map, spec.type, static_cast<cuuint32_t>(rank), const_cast<void*>(spec.data), sizes.data(),
      strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      to_driver(spec.swizzle), kPromotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    std::string shape;
    for (size_t i = 0; i < rank; ++i) {
      shape +=
          (i > 0 ? " x " : "") + std::to_string(sizes[i]) + " (box " + std::to_string(box[i]) + ")";
    }
    throw Error(ErrorCode::kDevice, {.what = "cuTensorMapEncodeTiled refused a tensor",
                                     .found = shape + ", CUresult " + std::to_string(status)});
  }
  return map;
}

}  // namespace conclave::inline v0::cuda
