#include "routing/cuda/fewer_routers.h"

#include "routing/limits.h"

#include "conclave/error.h"

#include <algorithm>
#include <string>
#include <utility>

namespace conclave::inline v0::routing {

FewerDeviceRouters::FewerDeviceRouters(MoeSpec spec)
    : spec_(std::move(spec)), routers_(static_cast<size_t>(std::max<int64_t>(spec_.top_k, 0))) {}

const DeviceRouter& FewerDeviceRouters::of(int64_t top_k) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<DeviceRouter>& router = routers_.at(static_cast<size_t>(top_k - 1));
  if (router == nullptr) {
    const MoeSpec fewer = with_fewer_choices(spec_, top_k);
    if (const Support support = device_router_supports(fewer); !support) {
      throw Error(ErrorCode::kUnsupported, {.what = "the router of this layer does not run on "
                                                    "CUDA for as few choices",
                                            .tensor = "top_k",
                                            .found = std::to_string(top_k),
                                            .hint = support.reason()});
    }
    router = find_device_router(fewer)->make(fewer);
  }
  return *router;
}

}  // namespace conclave::inline v0::routing
