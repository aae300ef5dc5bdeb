#include "cuda/device_rates.h"

#include <array>

namespace conclave::inline v0::cuda {
namespace {

struct NamedRates {
  std::string_view prefix;
  DeviceRates rates;
};

// The rates of an H100 follow from those of an H200, which has the same chip: copies are bound by
// memory, the cache by its clock.
constexpr DeviceRates h100(double tensor16, double tensor8, double float32, double memory) {
  return {.tensor16_teraflops = tensor16,
          .tensor8_teraflops = tensor8,
          .float32_teraflops = float32,
          .memory_terabytes = memory,
          .cache_terabytes = kH200Rates.cache_terabytes * tensor16 / kH200Rates.tensor16_teraflops,
          .copy_terabytes = kH200Rates.copy_terabytes * memory / kH200Rates.memory_terabytes,
          .launch_seconds = kH200Rates.launch_seconds};
}

// The first prefix that fits counts.
constexpr std::array kListed = {
    NamedRates{"NVIDIA H200", kH200Rates},
    NamedRates{"NVIDIA H100 PCIe", h100(756, 1513, 51, 2.0)},
    NamedRates{"NVIDIA H100 NVL", h100(835, 1671, 60, 3.9)},
    NamedRates{"NVIDIA H100", h100(989, 1979, 67, 3.35)},
};

// Dense products of a Hopper multiprocessor in a clock: 2048 of 16-bit operands, 128 of float32.
DeviceRates rates_of(const DeviceClocks& clocks) {
  const double cycles =
      static_cast<double>(clocks.multiprocessors) * static_cast<double>(clocks.core_khz) * 1e3;
  const double float32 = cycles * 2 * 128 / 1e12;
  const double tensor16 = cycles * 2 * 2048 / 1e12;
  // Memory moves two words in a clock.
  const double memory = 2.0 * static_cast<double>(clocks.memory_khz) * 1e3 *
                        static_cast<double>(clocks.memory_bus_bits) / 8 / 1e12;
  return h100(tensor16, 2 * tensor16, float32, memory);
}

}  // namespace

DeviceRates device_rates(std::string_view name, const DeviceClocks& clocks) {
  for (const NamedRates& listed : kListed) {
    if (name.starts_with(listed.prefix)) return listed.rates;
  }
  const bool known = clocks.core_khz > 0 && clocks.memory_khz > 0 && clocks.memory_bus_bits > 0;
  return known ? rates_of(clocks) : kH200Rates;
}

}  // namespace conclave::inline v0::cuda
