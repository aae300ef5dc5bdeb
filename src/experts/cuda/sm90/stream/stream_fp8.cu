#include "experts/cuda/sm90/stream/stream_bytes_kernel.cuh"

namespace conclave::inline v0::experts {

std::unique_ptr<DeviceExpertsKernel> make_stream_fp8(const ExpertsProblem& problem,
                                                     const DeviceExperts& weights,
                                                     const DeviceTile& tile) {
  const bool gated = problem.activation.gated;
  const bool in_blocks = problem.quant.weights == WeightScale::kBlock;
  return std::make_unique<stream::StreamBytesKernel>(
      KernelNames{.row = "cuda.stream_fp8_sm90",
                  .up = "experts.stream_fp8_sm90.up",
                  .down = "experts.stream_fp8_sm90.down"},
      in_blocks ? stream::find_kernels<__nv_fp8_e4m3, Scaling::kBlock>(tile, gated)
                : stream::find_kernels<__nv_fp8_e4m3, Scaling::kRow>(tile, gated),
      problem, weights, tile);
}

}  // namespace conclave::inline v0::experts
