// Weights from a source into device memory: through pinned memory from the host, or from device
// memory to device memory.
#pragma once

#include "cuda/stream.h"
#include "layer/weight_block.h"

#include "conclave/tensor.h"
#include "conclave/weights.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0 {

// Rows of device memory.
struct DeviceMatrix {
  std::byte* data = nullptr;
  int64_t stride_bytes = 0;
};

// A source of device memory as one of host memory, for what is looked at before it is used: scales.
// Every read waits for its copy.
class HostReads final : public WeightSource {
 public:
  HostReads(const WeightSource& source, cudaStream_t stream) : source_(source), stream_(stream) {}

  WeightInfo describe(WeightRole role) const override { return source_.describe(role); }
  void read(WeightRole role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override;
  std::string locate(WeightRole role, int64_t expert) const override {
    return source_.locate(role, expert);
  }

 private:
  const WeightSource& source_;
  cudaStream_t stream_;
};

// One thread's. The copies of a call may still run when it returns; finish waits for all.
class WeightUpload {
 public:
  WeightUpload(const WeightSource& source, cudaStream_t stream);

  // The source, readable by the host.
  const WeightSource& on_host() const {
    return source_.memory() == MemoryKind::kHost ? source_ : host_reads_;
  }

  // A block of a matrix to the front of `destination`, in the role's own type. Throws
  // Error(kDevice) where a source of device memory has no view.
  void copy(const BlockRequest& request, const DeviceMatrix& destination);
  // The same as float32 values on the host. Waits.
  std::vector<float> read_floats(const BlockRequest& request);
  std::vector<float> read_floats(WeightRole role, int64_t expert = 0);
  // A whole matrix on the host, as stored. Waits.
  Tensor read_matrix(WeightRole role);
  // Values to device memory.
  void copy_floats(const std::vector<float>& values, float* destination);
  void copy_ints(const std::vector<int32_t>& values, int32_t* destination);
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
  // A block on the host, in the role's own type. Waits.
  Tensor read_block(const BlockRequest& request);
  void copy_bytes(const void* values, size_t bytes, void* destination);
  void copy_from_host(const BlockRequest& request, const DeviceMatrix& destination);

  const WeightSource& source_;
  const HostReads host_reads_;
  cudaStream_t stream_;
  BlockLoader loader_;  // of on_host()
  std::array<Staging, 2> stagings_;
  size_t turn_ = 0;
};

}  // namespace conclave::inline v0
