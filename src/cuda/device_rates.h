// The rates of a GPU, as plain numbers for the cost model of kernels.
#pragma once

#include "cuda/architecture.h"

#include <cstdint>
#include <string_view>

namespace conclave::inline v0::cuda {

struct DeviceRates {
  double tensor16_teraflops = 0;  // dense products of 16-bit operands
  double tensor8_teraflops = 0;   // the same of 8-bit operands
  double float32_teraflops = 0;   // without tensor cores
  double memory_terabytes = 0;    // read from memory
  double cache_terabytes = 0;     // read from L2
  // Copying rows into another order: each is read once, written and read again.
  double copy_terabytes = 0;
  double launch_seconds = 0;  // what one more launch on a busy stream costs
};

using DeviceRate = double DeviceRates::*;  // one of them

// Peaks as published; cache, copies and launches as measured (bench/results/h200/LOG.md).
inline constexpr DeviceRates kH200Rates = {.tensor16_teraflops = 989,
                                           .tensor8_teraflops = 1979,
                                           .float32_teraflops = 67,
                                           .memory_terabytes = 4.8,
                                           .cache_terabytes = 5.5,
                                           .copy_terabytes = 3.2,
                                           .launch_seconds = 2e-6};

// The driver tells these numbers of a device whose rates nobody has listed.
struct DeviceClocks {
  int32_t multiprocessors = 0;
  int64_t core_khz = 0;
  int64_t memory_khz = 0;
  int32_t memory_bus_bits = 0;
};

// The listed rates of a device by its name; otherwise its clocks times the products in a clock of
// its capability, or, of a capability that is not listed, the fewest of any listed one, so that no
// kernel is preferred for products that may not be there. Without clocks, those of an H200: shares
// were measured on it, and a choice depends on ratios only.
DeviceRates device_rates(std::string_view name, const Capability& capability,
                         const DeviceClocks& clocks);

}  // namespace conclave::inline v0::cuda
