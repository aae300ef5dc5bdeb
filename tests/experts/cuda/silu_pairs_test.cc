// Kernels that divide two features by one product of divisors, held to the float64 oracle where one
// of the divisors is as large as it can be.
#include "kernel_runner.h"

#include <gtest/gtest.h>

namespace conclave::testing {
namespace {

using experts::DeviceKernelRow;
using experts::DeviceTile;

class SiluPairs : public HopperFixture, public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = reason_to_skip();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};

// Biases bring odd gates near -100 and even ones near -8, so that e^100 e^8 is beyond float32. Even
// features are nearly all of a row.
TEST_F(SiluPairs, GateFarBelowZero_LeavesItsNeighbour) {
  for (const KernelFormat& format : kernel_formats()) {
    // Only rows that stay 16-bit: codes of such products are for tests of codes.
    if (format.quant.activations != ActivationScale::kNone || format.dtype == DType::kF32) continue;
    CudaProblem problem(with_format({.num_experts = 2,
                                     .top_k = 1,
                                     .hidden_size = 136,
                                     .intermediate_size = 72,
                                     .num_tokens = 40,
                                     .has_bias = true},
                                    format));
    for (int64_t i = 0; i < 2 * 72; ++i) {
      problem.set_gate_bias(i / 72, i % 72, i % 2 == 1 ? -100.0F : -8.0F);
    }
    for (const DeviceKernelRow& row : rows_without_factors()) {
      if (!row.supports(problem.sizes())) continue;
      for (const DeviceTile& tile : all_tiles(row, problem)) {
        KernelRunner runner(problem, row, tile);
        runner.run();
        const RowErrors errors = problem.check_rows(runner.output());
        EXPECT_TRUE(within(errors, format.tolerance))
            << format.name << ": " << row.name << ' ' << to_string(tile) << ": "
            << errors.describe();
      }
    }
  }
}

}  // namespace
}  // namespace conclave::testing
