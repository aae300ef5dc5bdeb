// What the library needs of a device's own runtime outside of layers: memory, streams, copies.
#pragma once

#include "conclave/context.h"

#include <cstddef>
#include <functional>
#include <memory>
#include <string_view>

namespace conclave::inline v0 {

// One object a device, living as long as the process. Thread safe. All throw Error(kDevice) with
// the call that failed, allocations Error(kOutOfMemory).
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  virtual DeviceAllocator& allocator() const = 0;
  virtual Stream make_stream() const = 0;
  virtual void destroy_stream(Stream stream) const noexcept = 0;
  virtual void synchronize(Stream stream) const = 0;
  // Enqueued; to and from pageable memory they may wait.
  virtual void copy_to_device(const void* source, void* destination, size_t bytes,
                              Stream stream) const = 0;
  virtual void copy_to_host(const void* source, void* destination, size_t bytes,
                            Stream stream) const = 0;
  virtual void fill(void* destination, int value, size_t bytes, Stream stream) const = 0;
  // Throws Error(kDevice) naming `name` where `data` is not memory of this device.
  virtual void check_place(std::string_view name, const void* data) const = 0;
  // Captures what `enqueue` puts on the stream into a graph, replays it once untimed and then
  // `replays` times; the mean milliseconds of one. Waits.
  virtual double time_replays(Stream stream, const std::function<void()>& enqueue,
                              int32_t replays) const = 0;
};

}  // namespace conclave::inline v0
