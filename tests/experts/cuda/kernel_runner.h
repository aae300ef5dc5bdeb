// Runs a kernel of the catalog, in one of its tiles, on a problem's rows.
#pragma once

#include "experts/catalog.h"
#include "kernel_fixture.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace conclave::testing {

// A kernel with poisoned memory of its own.
class KernelRunner {
 public:
  KernelRunner(CudaProblem& problem, const experts::DeviceKernelRow& row,
               const experts::DeviceTile& tile)
      : KernelRunner(problem, row, tile, problem.sizes()) {}
  // The same, for sizes that differ in what the device is said to have.
  KernelRunner(CudaProblem& problem, const experts::DeviceKernelRow& row,
               const experts::DeviceTile& tile, const experts::ExpertsProblem& sizes)
      : problem_(problem),
        tile_(tile),
        kernel_(row.make(sizes, problem.weights(), tile)),
        workspace_(row.workspace_bytes(sizes, problem.options().num_tokens)),
        output_(static_cast<size_t>(problem.output_bytes())) {}

  void run() {
    workspace_.poison(nullptr);
    output_.poison(nullptr);
    experts::DeviceExpertsCall call =
        problem_.call(kernel_->tile_tokens(), 0, workspace_.data(), output_.data());
    if (tile_.sorted_input) {
      call.input = problem_.sorted_input(kernel_->tile_tokens(), 0, nullptr);
    }
    kernel_->run(call, nullptr);
    cuda::check(cudaDeviceSynchronize(), "kernel");
  }
  const std::byte* output() const { return output_.data(); }
  int64_t damage() const { return workspace_.damage() + output_.damage(); }

  std::vector<std::byte> bits() const { return bits_of(output_); }

 private:
  CudaProblem& problem_;
  experts::DeviceTile tile_;
  std::unique_ptr<experts::DeviceExpertsKernel> kernel_;
  GuardedDevice workspace_;
  GuardedDevice output_;
};

// The rows in tiles, but for those that read factors, which a CudaProblem has none of:
// tests/layer/cuda/code_meaning_test.cc.
inline std::vector<experts::DeviceKernelRow> rows_without_factors() {
  std::vector<experts::DeviceKernelRow> rows;
  for (const experts::DeviceKernelRow& row : experts::device_kernels().rows()) {
    if (!row.reads_factors) rows.push_back(row);
  }
  return rows;
}

inline std::vector<experts::DeviceTile> all_tiles(const experts::DeviceKernelRow& row,
                                                  const CudaProblem& problem) {
  const auto tiles = row.tiles(problem.sizes());
  return {tiles.begin(), tiles.end()};
}

}  // namespace conclave::testing
