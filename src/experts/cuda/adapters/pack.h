// Packs the factors of an expert's adapter for kernels of a GPU: rows of A one behind the other,
// rows of B likewise, both filled up with zeros to what is read at a time.
#pragma once

#include "experts/adapters/pack.h"
#include "experts/cuda/adapters/device_factors.h"

#include <cstddef>

namespace conclave::inline v0::experts {

// Factors in bf16 stay so, all others become float32.
constexpr DType device_factor_dtype(DType given) {
  return given == DType::kBF16 ? DType::kBF16 : DType::kF32;
}

// Bytes that pack_device_adapter writes for an expert, a multiple of 16.
size_t device_adapter_bytes(const ExpertAdapter& expert, const AdapterShape& shape);

// Writes them at `to`, in host memory, and returns where they will lie: as far from `place`, in
// device memory and aligned to 16 bytes, as they lie from `to`.
DeviceExpertFactors pack_device_adapter(const ExpertAdapter& expert, const AdapterShape& shape,
                                        std::byte* to, const std::byte* place);

}  // namespace conclave::inline v0::experts
