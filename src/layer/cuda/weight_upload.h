// Weights from a source into device memory: through pinned memory from the host, or from device
// memory to device memory.
#pragma once

#include "cuda/stream.h"
#include "layer/weight_block.h"

#include "conclave/weights.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace conclave::inline v0 {

// Rows of device memory.
struct DeviceMatrix {
  std::byte* data = nullptr;
  int64_t stride_bytes = 0;
};

// One thread's. The copies of a call may still run when it returns; finish waits for all.
class WeightUpload {
 public:
  WeightUpload(const WeightSource& source, cudaStream_t stream);

  // A block of a matrix to the front of `destination`, in the role's own type. Throws
  // Error(kDevice) where a source of device memory has no view.
  void copy(const BlockRequest& request, const DeviceMatrix& destination);
  // The same as float32 values on the host. Waits.
  std::vector<float> read_floats(const BlockRequest& request);
  std::vector<float> read_floats(WeightRole role, int64_t expert = 0);
  // float32 values to device memory.
  void copy_floats(const std::vector<float>& values, float* destination);
  void finish();

 private:
  struct PinnedDeleter {
    void operator()(std::byte* data) const noexcept;
  };
  struct Staging {
    std::unique_ptr<std::byte, PinnedDeleter> memory;
    cuda::OwnedEvent passed;
  };

  // A staging buffer whose last copy has passed.
  Staging& next_staging();
  ConstTensorView device_block(const BlockRequest& request) const;
  void copy_from_host(const BlockRequest& request, const DeviceMatrix& destination);

  const WeightSource& source_;
  cudaStream_t stream_;
  BlockLoader loader_;
  std::array<Staging, 2> stagings_;
  size_t turn_ = 0;
};

}  // namespace conclave::inline v0
