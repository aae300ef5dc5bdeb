#include "experts/cuda/sm90/tile_bytes/tile_bytes_kernel.cuh"

namespace conclave::inline v0::experts {

std::unique_ptr<DeviceExpertsKernel> make_tile_fp8(const ExpertsProblem& problem,
                                                   const DeviceExperts& weights,
                                                   const DeviceTile& tile) {
  using Block = tile_bytes::KernelFinder<__nv_fp8_e4m3, Scaling::kBlock>;
  using Row = tile_bytes::KernelFinder<__nv_fp8_e4m3, Scaling::kRow>;
  const bool in_blocks = problem.quant.weights == WeightScale::kBlock;
  return std::make_unique<tile_bytes::TileBytes>(
      KernelNames{.row = "cuda.tile_fp8_sm90",
                  .up = "experts.tile_fp8_sm90.up",
                  .down = "experts.tile_fp8_sm90.down"},
      in_blocks ? Block::find_all(problem) : Row::find_all(problem),
      tile_bytes::Operands{.rows = DType::kF8E4M3}, problem, weights, tile);
}

}  // namespace conclave::inline v0::experts
