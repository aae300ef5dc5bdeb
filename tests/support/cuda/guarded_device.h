// Device memory between canaries, poisoned: all bytes 0xff, which every float type reads as NaN.
#pragma once

#include "cuda/memory.h"

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace conclave::testing {

class GuardedDevice {
 public:
  // 256-byte aligned; a canary of 64 KiB on both sides.
  explicit GuardedDevice(size_t bytes);

  std::byte* data() const { return buffer_.data() + kCanaryBytes; }
  size_t bytes() const { return bytes_; }
  // Body and canaries; enqueued.
  void poison(CUstream_st* stream);
  // Zeroes the first bytes of the body; enqueued.
  void clear(size_t bytes, CUstream_st* stream);
  // Bytes of the canaries that are no longer poison. Synchronous.
  int64_t damage() const;

 private:
  static constexpr size_t kCanaryBytes = 64 * 1024;
  size_t bytes_;
  size_t tail_begin_;
  cuda::DeviceBuffer buffer_;
};

}  // namespace conclave::testing
