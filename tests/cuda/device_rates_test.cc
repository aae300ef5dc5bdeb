#include "cuda/device_rates.h"

#include <gtest/gtest.h>

#include <string>

namespace conclave::cuda {
namespace {

constexpr DeviceClocks kClocks{.multiprocessors = 100,
                               .core_khz = 1'000'000,
                               .memory_khz = 2'000'000,
                               .memory_bus_bits = 4096};

// 100 multiprocessors of 1 GHz: 0.2 teraflops for each product in a clock.
TEST(DeviceRates, UnlistedNames_HaveTheProductsOfTheirCapability) {
  const auto expect = [](const Capability& capability, double tensor16, double tensor8,
                         double float32) {
    const DeviceRates rates = device_rates("no such name", capability, kClocks);
    SCOPED_TRACE(to_string(capability));
    EXPECT_DOUBLE_EQ(rates.tensor16_teraflops, 0.2 * tensor16);
    EXPECT_DOUBLE_EQ(rates.tensor8_teraflops, 0.2 * tensor8);
    EXPECT_DOUBLE_EQ(rates.float32_teraflops, 0.2 * float32);
    EXPECT_DOUBLE_EQ(rates.memory_terabytes, 2.048);
  };
  expect({8, 0}, 1024, 1024, 64);
  expect({9, 0}, 2048, 4096, 128);
  expect({10, 0}, 4096, 8192, 128);
  expect({12, 0}, 512, 1024, 128);
  expect({13, 0}, 512, 512, 64);  // listed nowhere: the fewest of any
}

TEST(DeviceRates, EveryCapability_HasRatesAboveZero) {
  for (const Capability& capability : {Capability{8, 0}, {9, 0}, {99, 0}}) {
    for (const DeviceClocks& clocks : {kClocks, DeviceClocks{}}) {
      const DeviceRates rates = device_rates("no such name", capability, clocks);
      const auto& [tensor16, tensor8, float32, memory, cache, copy, launch] = rates;
      for (const double rate : {tensor16, tensor8, float32, memory, cache, copy, launch}) {
        EXPECT_GT(rate, 0) << to_string(capability);
      }
    }
  }
}

}  // namespace
}  // namespace conclave::cuda
