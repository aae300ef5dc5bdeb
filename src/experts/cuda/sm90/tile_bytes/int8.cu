#include "experts/cuda/sm90/tile_bytes/tile_bytes_kernel.cuh"

namespace conclave::inline v0::experts {

std::unique_ptr<DeviceExpertsKernel> make_tile_int8(const ExpertsProblem& problem,
                                                    const DeviceExperts& weights,
                                                    const DeviceTile& tile) {
  return std::make_unique<tile_bytes::TileBytes>(
      KernelNames{.row = "cuda.tile_int8_sm90",
                  .up = "experts.tile_int8_sm90.up",
                  .down = "experts.tile_int8_sm90.down"},
      tile_bytes::KernelFinder<int8_t, Scaling::kRow>::find_all(problem),
      tile_bytes::Operands{.rows = DType::kI8}, problem, weights, tile);
}

}  // namespace conclave::inline v0::experts
