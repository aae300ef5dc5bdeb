#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "routing/cuda/route.h"
#include "routing/cuda/route_row.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::routing {
namespace {

template <int kColumns>
__global__ void __launch_bounds__(kRouteWarps * 32)
    route_kernel(const __grid_constant__ device::RouteParams params) {
  extern __shared__ __align__(16) double scratch[];
  device::touch_parameters(params);
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const auto warp = static_cast<int64_t>(threadIdx.x / 32);
  const auto warps = static_cast<int64_t>(blockDim.x / 32);
  double* own = scratch + warp * route_scratch_doubles(params.rule);
  const int64_t step = gridDim.x * warps;
  for (int64_t token = blockIdx.x * warps + warp; token < params.args.num_tokens; token += step) {
    device::weigh_token(params, token, device::choose_token<kColumns>(params, token, own));
  }
}

}  // namespace

RouteKernel route_kernel_of(int32_t columns_a_lane) {
  switch (columns_a_lane) {
    case 1:
      return route_kernel<1>;
    case 2:
      return route_kernel<2>;
    case 4:
      return route_kernel<4>;
    case 8:
      return route_kernel<8>;
    case 16:
      return route_kernel<16>;
    default:
      return route_kernel<32>;
  }
}

void device_route(const DeviceRoutePlan& plan, const DeviceRouteArgs& args, CUstream_st* stream) {
  if (args.num_tokens == 0) return;
  constexpr int64_t kMaxBlocks = int64_t{1} << 30;
  cuda::launch("routing.route", plan.kernel,
               {.blocks = std::min(kMaxBlocks, ceil_div(args.num_tokens, int64_t{plan.warps})),
                .threads = plan.warps * 32,
                .shared_bytes = plan.shared_bytes,
                .stream = stream},
               device::route_params(plan, args));
}

}  // namespace conclave::inline v0::routing
