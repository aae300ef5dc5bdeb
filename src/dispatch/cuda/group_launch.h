// Makes the device code's parameters from a grouping's arguments, for kernels that group alone or
// after routing. Device code only.
#pragma once

#include "dispatch/cuda/group.h"
#include "dispatch/cuda/group_shape.h"
#include "dispatch/cuda/group_slots.cuh"

#include <cstdint>

namespace conclave::inline v0::dispatch {

struct GroupLaunch {
  device::GroupParams params;
  GroupedRows rows;
};

// Throws as group_layout.
GroupLaunch prepare_group(const DeviceGroupArgs& args);
// Allows a kernel as much shared memory as any shape takes, if `shape` needs more than the default.
// The limit is the kernel's, for all layers, and so must not depend on one of them.
void allow_group_shared(const void* kernel, const GroupShape& shape);
// Those of device_sanitize_and_group, for prepare_group_kernels.
void prepare_sanitize_and_group(const GroupShape& shape);

constexpr int32_t log2_or_minus_one(int32_t value) {
  if (value < 1 || (value & (value - 1)) != 0) return -1;
  int32_t shift = 0;
  while ((value >> shift) != 1) ++shift;
  return shift;
}

// Bits that hold every number below `count`.
constexpr int32_t bits_below(int32_t count) {
  int32_t bits = 0;
  while ((int64_t{1} << bits) < count) ++bits;
  return bits;
}

}  // namespace conclave::inline v0::dispatch
