#include "experts/cuda/sm90/tile/kernels.cuh"

namespace conclave::inline v0::experts::tile {

std::span<const Kernel> kernels_bf16() { return kKernelsOf<__nv_bfloat16>; }

}  // namespace conclave::inline v0::experts::tile
