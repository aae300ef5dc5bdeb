// The engines of this build. Only this file of the folder depends on the build's options.
#include "experts/catalog.h"

#include "core/build_config.h"
#include "layer/engine.h"
#include "layer/host_engine.h"
#if CONCLAVE_BUILD_CUDA
#include "layer/cuda/cuda_engine.h"
#include "layer/cuda/token_route.h"
#endif

#include "conclave/device.h"
#include "conclave/error.h"
#include "conclave/reference.h"

#include <array>
#include <string>

namespace conclave::inline v0 {
namespace {

std::string describe_host() { return cpu_info().brand; }
Support host_usable(int32_t) { return Support::yes(); }
const DeviceRuntime* no_runtime(int32_t) { return nullptr; }

constexpr std::array kEngines = {
#if CONCLAVE_BUILD_CUDA
    EngineRow{.name = "cuda",
              .device = DeviceKind::kCuda,
              .code_ambiguity = kTensorCoreCodeAmbiguity,
              .describe = describe_cuda,
              .usable = cuda_usable,
              .make = make_cuda_engine,
              .plan = plan_cuda_engine,
              .candidates = cuda_candidates,
              .runtime = cuda_runtime,
              .routes = cuda_routes,
              .make_route = make_cuda_route,
              .left_out = experts::left_out_kernels},
#endif
    EngineRow{.name = "cpu",
              .device = DeviceKind::kCpu,
              .code_ambiguity = kFloat32CodeAmbiguity,
              .describe = describe_host,
              .usable = host_usable,
              .make = make_host_engine,
              .plan = plan_host_engine,
              .candidates = nullptr,
              .runtime = no_runtime,
              .routes = nullptr,
              .make_route = nullptr,
              .left_out = nullptr,
              .make_unfilled = make_unfilled_host_engine}};

}  // namespace

const EngineRow* find_engine_row(std::string_view name) noexcept {
  for (const EngineRow& row : kEngines) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

const EngineRow& engine_row(const Device& device) {
  for (const EngineRow& row : kEngines) {
    if (row.device == device.kind) return row;
  }
  throw Error(ErrorCode::kUnsupported,
              {.what = "this build has no CUDA support",
               .found = to_string(device),
               .hint = "configure with CONCLAVE_CUDA=ON where nvcc 12.4 or newer is"});
}

double code_ambiguity(const Context& context) { return engine_row(context).code_ambiguity; }

const DeviceRuntime* device_runtime(const Context& context) {
  const Device device = parse_device(context.device());
  return engine_row(device).runtime(device.ordinal);
}

}  // namespace conclave::inline v0
