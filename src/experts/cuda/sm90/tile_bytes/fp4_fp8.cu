#include "experts/cuda/sm90/tile_bytes/tile_bytes_kernel.cuh"

namespace conclave::inline v0::experts {

std::unique_ptr<DeviceExpertsKernel> make_tile_fp4_fp8(const ExpertsProblem& problem,
                                                       const DeviceExperts& weights,
                                                       const DeviceTile& tile) {
  using tile_bytes::WeightForm;
  using Groups = tile_bytes::KernelFinder<__nv_fp8_e4m3, Scaling::kBlock, WeightForm::kLanes>;
  using Rows = tile_bytes::KernelFinder<__nv_fp8_e4m3, Scaling::kRow, WeightForm::kLanes>;
  const bool in_groups = problem.quant.activations == ActivationScale::kGroup;
  return std::make_unique<tile_bytes::TileBytes>(
      KernelNames{.row = "cuda.tile_fp4_fp8_sm90",
                  .up = "experts.tile_fp4_fp8_sm90.up",
                  .down = "experts.tile_fp4_fp8_sm90.down"},
      in_groups ? Groups::find_all(problem) : Rows::find_all(problem),
      tile_bytes::Operands{.rows = DType::kF8E4M3, .weights = WeightForm::kLanes}, problem, weights,
      tile);
}

}  // namespace conclave::inline v0::experts
