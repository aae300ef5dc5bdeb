#include "experts/cuda/sm90/stream/stream_bytes_kernel.cuh"

namespace conclave::inline v0::experts {

std::unique_ptr<DeviceExpertsKernel> make_stream_int8(const ExpertsProblem& problem,
                                                      const DeviceExperts& weights,
                                                      const DeviceTile& tile) {
  return std::make_unique<stream::StreamBytesKernel>(
      KernelNames{.row = "cuda.stream_int8_sm90",
                  .up = "experts.stream_int8_sm90.up",
                  .down = "experts.stream_int8_sm90.down"},
      stream::find_kernels<int8_t, Scaling::kRow>(tile, problem.activation.gated), problem, weights,
      tile);
}

}  // namespace conclave::inline v0::experts
