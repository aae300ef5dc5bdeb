// Experts with adapters on a GPU: a seam beside DeviceExpertsKernel, whose kernels know of none.
#pragma once

#include "experts/cuda/adapters/device_factors.h"
#include "experts/cuda/device_experts.h"

#include "conclave/error.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace conclave::inline v0::experts {

// A call of experts some of whose rows have adapters.
struct AdaptedCall {
  DeviceExpertsCall experts;  // neither finish nor sums
  DeviceAdapters adapters;
  TermSource source;  // gate's and up's; down's are the activated rows
  AdapterTerms up;
  AdapterTerms down;
};

// Immutable after make; run may be called for several streams at once with distinct workspaces.
class AdapterKernel {
 public:
  virtual ~AdapterKernel() = default;
  virtual int32_t tile_tokens() const = 0;
  // Works as DeviceExpertsKernel::run. A row without factors has the bits that kernels of the same
  // arithmetic give it.
  virtual void run(const AdaptedCall& call, CUstream_st* stream) const = 0;
};

struct AdapterKernelRow {
  std::string_view name;
  // That of the device kernels whose rows keep their bits.
  std::string_view arithmetic;
  Support (*supports)(const ExpertsProblem& problem) = nullptr;
  std::span<const DeviceTile> (*tiles)(const ExpertsProblem& problem) = nullptr;
  std::unique_ptr<AdapterKernel> (*make)(const ExpertsProblem& problem,
                                         const DeviceExperts& weights,
                                         const DeviceTile& tile) = nullptr;
  size_t (*workspace_bytes)(const ExpertsProblem& problem, int64_t tokens) = nullptr;
  bool reads_values = false;  // these as DeviceKernel has them
  bool reads_factors = false;
};

// In order of preference; the last takes every format. A build without CUDA has none.
std::span<const AdapterKernelRow> adapter_kernels();

}  // namespace conclave::inline v0::experts
