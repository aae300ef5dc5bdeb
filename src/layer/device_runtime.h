// The parts of a device's own runtime that the library needs outside layers: memory, streams,
// copies.
#pragma once

#include "conclave/context.h"

#include <cstddef>
#include <functional>
#include <memory>
#include <string_view>

namespace conclave::inline v0 {

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
  virtual void fill(void* destination, int value, size_t bytes, Stream stream) const = 0;
  // Throws Error(kDevice) naming `name` if `data` is not memory of this device.
  virtual void check_place(std::string_view name, const void* data) const = 0;
  // Captures the work that `enqueue` puts on the stream into a graph, replays it once untimed and
  // then `replays` times; returns the mean milliseconds of one replay. Waits.
  virtual double time_replays(Stream stream, const std::function<void()>& enqueue,
                              int32_t replays) const = 0;
};

}  // namespace conclave::inline v0
