// The routers of a spec with fewer choices, on a device.
#pragma once

#include "routing/cuda/device_router.h"

#include "conclave/spec.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace conclave::inline v0::routing {

// Each is made by the first call that asks for it and kept. Calls may run at the same time.
class FewerDeviceRouters {
 public:
  // The spec has a device router.
  explicit FewerDeviceRouters(MoeSpec spec);

  // Needs 1 <= top_k < the spec's. Throws Error(kUnsupported) with the reason where the device has
  // no such router.
  const DeviceRouter& of(int64_t top_k);

 private:
  MoeSpec spec_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<DeviceRouter>> routers_;  // that for k at k - 1
};

}  // namespace conclave::inline v0::routing
