// The ring of one layer in a device's memory. Builds without CUDA have one that cannot be made.
#pragma once

#include "conclave/context.h"
#include "conclave/device_routing_record.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::record {

// A ring counts these itself.
struct RingCounts {
  int64_t given = 0;  // tokens
  int64_t held = 0;
};

class DeviceRing {
 public:
  // Books the memory. Throws Error(kOutOfMemory, kDevice).
  DeviceRing(const Context& context, const RecordedLayer& layer, int64_t capacity,
             WhenFull when_full);
  DeviceRing(const DeviceRing&) = delete;
  DeviceRing& operator=(const DeviceRing&) = delete;
  ~DeviceRing();  // waits

  const RecordedLayer& layer() const { return layer_; }
  // Enqueues a launch for checked rows. Throws Error(kDevice) for memory that is elsewhere.
  void record(const DeviceRoutingRows& rows, Stream stream);

  // Wait for the device. Throw Error(kExpertId, kState) for what rows said that were recorded.
  RingCounts counts() const;
  RecordedRows copy() const;
  void clear();

 private:
  struct State;
  State read_state() const;

  RecordedLayer layer_;
  int64_t capacity_;
  WhenFull when_full_;
  int32_t ordinal_;
  DeviceAllocator* allocator_;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace conclave::inline v0::record
