// The route kernel for tokens of more slots than a warp has lanes.
#include "cuda/device/grid.cuh"
#include "routing/cuda/route.h"
#include "routing/cuda/wide_row.cuh"

#include <cstdint>

namespace conclave::inline v0::routing {
namespace {

template <int kColumns>
__global__ void __launch_bounds__(kRouteWarps * 32)
    wide_route_kernel(const __grid_constant__ device::RouteParams params) {
  extern __shared__ __align__(16) double scratch[];
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const auto warp = static_cast<int64_t>(threadIdx.x / 32);
  const auto warps = static_cast<int64_t>(blockDim.x / 32);
  double* own = scratch + warp * wide_scratch_doubles(params.rule);
  const int64_t step = gridDim.x * warps;
  for (int64_t token = blockIdx.x * warps + warp; token < params.args.num_tokens; token += step) {
    device::route_wide<kColumns>(params, token, own);
  }
}

}  // namespace

// More than 32 slots need more than 32 columns, hence two per lane at least.
RouteKernel wide_route_kernel_of(int32_t columns_a_lane) {
  switch (columns_a_lane) {
    case 2:
      return wide_route_kernel<2>;
    case 4:
      return wide_route_kernel<4>;
    case 8:
      return wide_route_kernel<8>;
    case 16:
      return wide_route_kernel<16>;
    default:
      return wide_route_kernel<32>;
  }
}

}  // namespace conclave::inline v0::routing
