// Device memory between canaries, poisoned with bytes 0xff, which every float type reads as NaN.
#pragma once

#include "cuda/memory.h"

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace conclave::testing {

class GuardedDevice {
 public:
  // Allocates 256-byte aligned memory with a canary of 64 KiB on both sides.
  explicit GuardedDevice(size_t bytes);

  std::byte* data() const { return buffer_.data() + kCanaryBytes; }
  size_t bytes() const { return bytes_; }
  // Poisons body and canaries; only enqueues the work.
  void poison(CUstream_st* stream);
  // Zeroes the first bytes of the body; only enqueues the work.
  void clear(size_t bytes, CUstream_st* stream);
  // Counts canary bytes that are no longer poison. Synchronous.
  int64_t damage() const;

 private:
  static constexpr size_t kCanaryBytes = 64 * 1024;
  size_t bytes_;
  size_t tail_begin_;
  cuda::DeviceBuffer buffer_;
};

}  // namespace conclave::testing
