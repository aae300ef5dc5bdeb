#include "cuda/device_rates.h"

#include <array>

namespace conclave::inline v0::cuda {
namespace {

struct NamedRates {
  std::string_view prefix;
  DeviceRates rates;
};

// Less than of an H200, as the times of all tiles in 53 cells tell on an H100 SXM at its clocks
// (bench/results/h200/2026-11-25-h100-tuning-check.md): reading weights again from L2, and copying
// rows into another order.
constexpr double kH100CacheTerabytes = 4.1;
constexpr double kH100CopyTerabytes = 1.3;
constexpr double kH100MemoryTerabytes = 3.35;

// An H100 has the chip of an H200: copies are bound by memory, the cache by its clock.
constexpr DeviceRates h100(double tensor16, double tensor8, double float32, double memory) {
  return {.tensor16_teraflops = tensor16,
          .tensor8_teraflops = tensor8,
          .float32_teraflops = float32,
          .memory_terabytes = memory,
          .cache_terabytes = kH100CacheTerabytes * tensor16 / kH200Rates.tensor16_teraflops,
          .copy_terabytes = kH100CopyTerabytes * memory / kH100MemoryTerabytes,
          .launch_seconds = kH200Rates.launch_seconds};
}

// The first prefix that fits counts.
constexpr std::array kListed = {
    NamedRates{"NVIDIA H200", kH200Rates},
    NamedRates{"NVIDIA H100 PCIe", h100(756, 1513, 51, 2.0)},
    NamedRates{"NVIDIA H100 NVL", h100(835, 1671, 60, 3.9)},
    NamedRates{"NVIDIA H100", h100(989, 1979, 67, kH100MemoryTerabytes)},
};

// Dense products of a multiprocessor in a clock, as published.
struct ClockProducts {
  Capability capability;
  double tensor16 = 0;
  double tensor8 = 0;  // without 8-bit floats: by 16-bit ones
  double float32 = 0;
};
constexpr std::array kProducts = {
    ClockProducts{{8, 0}, 1024, 1024, 64},    // A100
    ClockProducts{{8, 6}, 512, 512, 128},     // A40
    ClockProducts{{8, 9}, 512, 1024, 128},    // L40S
    ClockProducts{{9, 0}, 2048, 4096, 128},   // H100, H200
    ClockProducts{{10, 0}, 4096, 8192, 128},  // B200
    ClockProducts{{12, 0}, 512, 1024, 128},   // RTX PRO 6000
};
constexpr ClockProducts kNeutral{{}, 512, 512, 64};

ClockProducts products_of(const Capability& capability) {
  for (const ClockProducts& listed : kProducts) {
    if (listed.capability == capability) return listed;
  }
  return kNeutral;
}

DeviceRates rates_of(const ClockProducts& products, const DeviceClocks& clocks) {
  const double cycles =
      static_cast<double>(clocks.multiprocessors) * static_cast<double>(clocks.core_khz) * 1e3;
  // Memory moves two words in a clock.
  const double memory = 2.0 * static_cast<double>(clocks.memory_khz) * 1e3 *
                        static_cast<double>(clocks.memory_bus_bits) / 8 / 1e12;
  // The cache follows the clock, as on an H100 of these clocks.
  const double hopper16 = cycles * 2 * 2048 / 1e12;
  DeviceRates rates = h100(hopper16, 2 * hopper16, cycles * 2 * products.float32 / 1e12, memory);
  rates.tensor16_teraflops = cycles * 2 * products.tensor16 / 1e12;
  rates.tensor8_teraflops = cycles * 2 * products.tensor8 / 1e12;
  return rates;
}

}  // namespace

DeviceRates device_rates(std::string_view name, const Capability& capability,
                         const DeviceClocks& clocks) {
  for (const NamedRates& listed : kListed) {
    if (name.starts_with(listed.prefix)) return listed.rates;
  }
  const bool known = clocks.core_khz > 0 && clocks.memory_khz > 0 && clocks.memory_bus_bits > 0;
  return known ? rates_of(products_of(capability), clocks) : kH200Rates;
}

}  // namespace conclave::inline v0::cuda
