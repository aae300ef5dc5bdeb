// Copies weights from a source into device memory: from the host through pinned memory, or from
// device memory directly. Threads have one each (upload_lanes.h).
#pragma once

#include "cuda/stream.h"
#include "experts/cuda/lane_codes.h"
#include "layer/cuda/pinned_ring.h"
#include "layer/known_codes.h"
#include "quant/weight_block.h"

#include "conclave/context.h"
#include "conclave/tensor.h"
#include "conclave/weights.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0 {

// The stored row and column of each row and column; -1: none, which gets zeros. Without rows all
// are copied in their order.
struct PlacedCodes {
  std::span<const int32_t> rows;
  std::span<const int32_t> columns;
};

// A matrix in device memory.
struct DeviceMatrix {
  std::byte* data = nullptr;
  int64_t stride_bytes = 0;
};

// Presents a source of device memory as one of host memory, for values that the host inspects
// first, such as scales. Every read waits for its copy, which goes by way of the ring, if there is
// one: copies to pageable memory take several times as long, and one thread at a time.
class HostReads final : public WeightSource {
 public:
  HostReads(const WeightSource& source, cudaStream_t stream, PinnedRing* ring = nullptr)
      : source_(source), stream_(stream), ring_(ring) {}

  WeightInfo describe(WeightId id) const override { return source_.describe(id); }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override;
  std::string locate(WeightId id, int64_t expert) const override {
    return source_.locate(id, expert);
  }

 private:
  const WeightSource& source_;
  cudaStream_t stream_;
  PinnedRing* ring_;
};

// Serves one thread. Copies may still run when a call returns; finish waits for all.
class WeightUpload {
 public:
  // The ring outlives this.
  WeightUpload(const WeightSource& source, cudaStream_t stream, PinnedRing& ring);
  WeightUpload(const WeightUpload&) = delete;
  WeightUpload& operator=(const WeightUpload&) = delete;

  // The source, readable by the host.
  const WeightSource& on_host() const {
    return source_.memory() == MemoryKind::kHost ? source_ : host_reads_;
  }

  // Whether the device reads such a block by itself.
  bool only_enqueues(const BlockRequest& request) const;
  // Rows of scales that are best read together: a few from the host, whose floats stay in a core's
  // cache then, all of `rows` from a device, where each read waits.
  int64_t scale_rows(int64_t rows) const {
    return source_.memory() == MemoryKind::kHost ? std::min<int64_t>(rows, 128) : rows;
  }

  // Copies a block of a matrix to the front of `destination`, in its own type. Throws
  // Error(kDevice) if a source of device memory has no view.
  void copy(const BlockRequest& request, const DeviceMatrix& destination);
  // Copies codes of the block to other places, by way of the host.
  void copy_placed(const BlockRequest& request, const PlacedCodes& places,
                   const DeviceMatrix& destination);
  // Copies codes as those of fewer bits that `known` says they are, by way of the host.
  void copy_known(const BlockRequest& request, const KnownCodes& known,
                  const DeviceMatrix& destination);
  // Puts codes that `copy` brought into their order on a device.
  void arrange_codes(std::byte* codes, int64_t rows, int64_t row_bytes, experts::CodeOrder order);
  // Reads the same as float32 values on the host. Waits.
  std::vector<float> read_floats(const BlockRequest& request);
  std::vector<float> read_floats(WeightId id, int64_t expert = 0);
  // Reads a whole matrix to the host, as stored. Waits.
  Tensor read_matrix(WeightId id);
  // Copy values to device memory.
  void copy_floats(const std::vector<float>& values, float* destination);
  void copy_ints(const std::vector<int32_t>& values, int32_t* destination);
  void copy_bytes(std::span<const std::byte> values, void* destination);
  void finish();

 private:
  // Reads a block to the host, in its own type. Waits.
  Tensor read_block(const BlockRequest& request);
  void copy_from_host(const BlockRequest& request, const DeviceMatrix& destination);

  const WeightSource& source_;
  // Reads do not wait for copies; null if the source is in the host's memory.
  const cuda::OwnedStream reads_;
  const HostReads host_reads_;
  cudaStream_t stream_;
  PinnedRing& ring_;
  BlockLoader loader_;  // reads on_host()
};

}  // namespace conclave::inline v0
