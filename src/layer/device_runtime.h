// The parts of a device's own runtime that the library needs outside layers: memory, streams,
// copies.
#pragma once

#include "conclave/context.h"
#include "conclave/weights.h"

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

namespace conclave::inline v0 {

// Rows of a source's matrix, and where they go in device memory, one behind the other.
struct RowsToDevice {
  WeightId id = weights::kGate;
  int64_t expert = 0;
  WeightBlock block = {};
  std::byte* to = nullptr;
};

// Brings rows of one source to a device. Serves one thread; waits for its copies at its end.
class RowUpload {
 public:
  virtual ~RowUpload() = default;
  // Enqueues the copies on the stream. Throws what the source throws.
  virtual void copy(std::span<const RowsToDevice> rows) = 0;
};

// One object per device, which lives as long as the process. Thread safe. All methods throw
// Error(kDevice) with the call that failed; allocations throw Error(kOutOfMemory).
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  virtual DeviceAllocator& allocator() const = 0;
  virtual Stream make_stream() const = 0;
  virtual void destroy_stream(Stream stream) const noexcept = 0;
  virtual void synchronize(Stream stream) const = 0;
  // Copies and fills are enqueued; copies to and from pageable memory may wait.
  virtual void copy_to_device(const void* source, void* destination, size_t bytes,
                              Stream stream) const = 0;
  virtual void copy_to_host(const void* source, void* destination, size_t bytes,
                            Stream stream) const = 0;
  // From the host's memory or the device's; threads of `executor` read. Source and executor outlive
  // it.
  virtual std::unique_ptr<RowUpload> make_row_upload(const WeightSource& source, Stream stream,
                                                     Executor& executor) const = 0;
  virtual void fill(void* destination, int value, size_t bytes, Stream stream) const = 0;
  // Throws Error(kDevice) naming `name` if `data` is not memory of this device.
  virtual void check_place(std::string_view name, const void* data) const = 0;
  // Captures the work that `enqueue` puts on the stream into a graph, replays it once untimed and
  // then `replays` times; returns the mean milliseconds of one replay. Waits.
  virtual double time_replays(Stream stream, const std::function<void()>& enqueue,
                              int32_t replays) const = 0;
};

}  // namespace conclave::inline v0
