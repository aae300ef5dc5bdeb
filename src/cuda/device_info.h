// Properties of a GPU as plain values, so that any machine can test the choice of tiles.
#pragma once

#include "cuda/architecture.h"
#include "cuda/device_rates.h"

#include "conclave/error.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace conclave::inline v0::cuda {

struct DeviceInfo {
  std::string name;  // "NVIDIA H200"
  int32_t ordinal = 0;
  Capability capability = {};
  int32_t multiprocessors = 0;
  int64_t l2_bytes = 0;
  int64_t memory_bytes = 0;
  int64_t shared_bytes_per_block = 0;  // with the opt-in: 227 KiB on Hopper
  // The most blocks in a cluster whose blocks take a multiprocessor each; every device with
  // clusters holds 8. device_info leaves it so: only a kernel can ask for more.
  int32_t cluster_blocks = 8;
  std::span<const Architecture> plain_code = plain_architectures();  // static storage
  int64_t most_tokens = int64_t{1} << 28;                            // in one call
  DeviceRates rates = kH200Rates;
};

// Yes if the device can run layers: the plain kernels, which take every problem, were compiled for
// it. Otherwise the reason names the device's capability and what they were compiled for.
Support runs_plain_kernels(const DeviceInfo& device);
// The most blocks in a cluster of plain kernels; 1 where their code for the device has no clusters.
int32_t most_cluster_blocks(const DeviceInfo& device);

// Throws Error(kDevice) with the driver's reason, or with the number of devices.
DeviceInfo device_info(int32_t ordinal);
// `count` is 0, with the reason, if no driver or no device can be used.
struct DeviceCount {
  int32_t count = 0;
  std::string reason;
};
DeviceCount count_devices() noexcept;

// Makes `ordinal` current while it lives, then restores the previous device.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t ordinal);
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard();

 private:
  int previous_ = 0;
};

}  // namespace conclave::inline v0::cuda
