#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "routing/cuda/device_router.h"
#include "routing/cuda/route_row.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::routing {
namespace {

constexpr int32_t kMaxWarps = 4;
constexpr int64_t kSharedBytes = 48 * 1024;

template <int kColumns>
__global__ void __launch_bounds__(kMaxWarps * 32)
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

using Kernel = void (*)(device::RouteParams);

Kernel kernel_of(int32_t columns_a_lane) {
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

}  // namespace

void device_route(const MoeSpec& spec, const DeviceRouteArgs& args, CUstream_st* stream) {
  if (args.num_tokens == 0) return;
  const device::RouteParams params = device::route_params(spec, args);
  constexpr int64_t kMaxBlocks = int64_t{1} << 30;
  const int64_t scratch_bytes = route_scratch_doubles(params.rule) * int64_t{sizeof(double)};
  // 512 groups of two experts take 16 KiB per warp.
  const int64_t warps = scratch_bytes * kMaxWarps <= kSharedBytes ? kMaxWarps : 2;
  cuda::launch("routing.route", kernel_of(columns_a_lane(params.rule)),
               {.blocks = std::min(kMaxBlocks, ceil_div(args.num_tokens, warps)),
                .threads = static_cast<int32_t>(warps * 32),
                .shared_bytes = static_cast<size_t>(scratch_bytes * warps),
                .stream = stream},
               params);
}

}  // namespace conclave::inline v0::routing
