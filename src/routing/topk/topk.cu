#include "routing/cuda/device_router.h"
#include "routing/cuda/route.h"
#include "routing/topk/topk.h"

#include <memory>

namespace conclave::inline v0::routing {
namespace {

// The shared kernel is all of it.
class TopkOnDevice final : public DeviceRouter {
 public:
  explicit TopkOnDevice(const MoeSpec& spec) : finish_(plan_device_route(spec)) {}
  const DeviceRoutePlan* finish() const override { return &finish_; }
  const int32_t* route(const DeviceRouterArgs& args, CUstream_st*) const override {
    return args.given_ids;
  }

 private:
  DeviceRoutePlan finish_;
};

std::unique_ptr<DeviceRouter> make_topk(const MoeSpec& spec) {
  return std::make_unique<TopkOnDevice>(spec);
}

}  // namespace

const DeviceRouterRow kTopkOnDevice{
    .supports = device_route_supports, .make = make_topk, .writes_choices = false};

}  // namespace conclave::inline v0::routing
