#include "experts/cuda/sm90/tile/kernels.cuh"

namespace conclave::inline v0::experts::tile {

std::span<const Kernel> kernels_f16() { return kKernelsOf<__half>; }

}  // namespace conclave::inline v0::experts::tile
