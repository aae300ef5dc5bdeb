#include "routing/cuda/device_router.h"

#include "routing/router.h"

#include <string>

namespace conclave::inline v0::routing {

const DeviceRouterRow* find_device_router(const MoeSpec& spec) noexcept {
  const RouterRow* row = find_router(spec.router.name);
  return row != nullptr ? row->device : nullptr;
}

Support device_router_supports(const MoeSpec& spec) {
  const DeviceRouterRow* row = find_device_router(spec);
  if (row != nullptr) return row->supports(spec);
  return Support::no("router " + spec.router.name + " is code of the host");
}

Support at_most(const char* what, int64_t found, int64_t limit) {
  if (found <= limit) return Support::yes();
  return Support::no(std::string(what) + " " + std::to_string(found) + " exceeds " +
                     std::to_string(limit));
}

}  // namespace conclave::inline v0::routing
