// The seam between a layer and the kind of device that runs it.
#pragma once

#include "core/device.h"
#include "layer/device_runtime.h"

#include "conclave/error.h"
#include "conclave/layer.h"
#include "conclave/token_router.h"
#include "conclave/tuning.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

// One layer's plan and weights on its device. MoeLayer's methods forward to it and share its
// contract.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual void forward(const ForwardArgs& args) = 0;
  virtual void reload(const WeightSource& source, ReloadMode mode) = 0;
  virtual const MoeSpec& spec() const noexcept = 0;
  virtual const ParallelSpec& parallel() const noexcept = 0;
  virtual const Plan& plan() const noexcept = 0;
  virtual LayerStatus status() const = 0;
  virtual size_t workspace_bytes(int64_t tokens) const = 0;
  virtual std::unique_ptr<Engine> with_max_tokens(int64_t max_tokens) const = 0;
};

// The arguments of create and make_plan.
struct EngineRequest {
  const Context& context;
  const MoeSpec& spec;
  const LayerOptions& options;
  const ParallelSpec& parallel;
};

// Routes one call of a TokenRouter.
using RouteFunction = std::function<void(const RouteArgs& args)>;

struct EngineRow {
  std::string_view name;
  DeviceKind device = DeviceKind::kCpu;
  // Describes its devices if the first is usable: "cuda:0 NVIDIA H200, 139.8 GiB".
  std::string (*describe)();
  // Yes if this machine has the device, otherwise the reason.
  Support (*usable)(int32_t ordinal);
  // Throws as MoeLayer::create.
  std::unique_ptr<Engine> (*make)(const EngineRequest& request, const WeightSource& source);
  // Works as make_plan does.
  Plan (*plan)(const EngineRequest& request);
  // Works as tuning_candidates does; null if there is nothing to tune.
  std::vector<TuningEntry> (*candidates)(const EngineRequest& request, int64_t tokens);
  // Null for host memory.
  const DeviceRuntime* (*runtime)(int32_t ordinal);
  // For TokenRouter; null if the engine runs the routers of the catalog.
  Support (*routes)(const MoeSpec& spec);
  RouteFunction (*make_route)(int32_t ordinal, const MoeSpec& spec);
};

// The row of this name, or null.
const EngineRow* find_engine_row(std::string_view name) noexcept;
// The row of a device. Throws Error(kUnsupported) if this build has none.
const EngineRow& engine_row(const Device& device);
inline const EngineRow& engine_row(const Context& context) {
  return engine_row(parse_device(context.device()));
}
// The runtime of the context's device; null on "cpu".
const DeviceRuntime* device_runtime(const Context& context);

}  // namespace conclave::inline v0
