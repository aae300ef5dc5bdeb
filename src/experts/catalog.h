// The kernels of the experts on every device: one kind of row, one table.
#pragma once

#include "core/catalog.h"
#include "cuda/device_rates.h"
#include "experts/problem.h"

#include "conclave/error.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace conclave::inline v0::experts {

class OneLaunchKernel;
class DeviceExpertsKernel;
class ExpertsKernel;
struct DeviceExperts;
struct DeviceTile;

// The tokens of the calls that a row of one launch can take, and of those that it should take where
// nothing has been measured.
struct OneLaunchReach {
  int64_t most = 0;
  int64_t preferred = 0;
};

// The choice of a tile asks for two numbers: the share of the device's rate of products
// (`products`) that full tiles reach, and the share of its memory's rate at which weights are read
// for few rows.
struct TileCost {
  cuda::DeviceRate products = &cuda::DeviceRates::tensor16_teraflops;
  double product_share = 0;
  double memory_share = 0;
  int32_t row_step = 0;  // step in which an expert's last rows are computed; 0: a quarter tile
  // The same for tiles with sorted_input, if these are kernels of another shape; else 0.
  double sorted_product_share = 0;
  double sorted_memory_share = 0;
  int32_t sorted_row_step = 0;
  int32_t sorted_end_depth = 0;  // time of a product's end, in elements of K
};

// A row makes its kernel in one of three ways, the others being null: by `make`, of a CPU; by
// `make_on_device`, of a GPU, with any of its `tiles`; by `make_one_launch`, for the whole forward
// of few tokens at once (decode_call.h), beside a row of the second kind, which serves the calls
// that ask for more than a weighted sum.
struct KernelRow {
  std::string_view name;  // "cpu.avx512", "cuda.stream_sm90"
  // Asked about problems of its own device only.
  Support (*supports)(const ExpertsProblem& problem);
  // Kernels with the same text give an expert's result for a token row the same bits, in whichever
  // tile, as D2 needs. Empty: only this kernel's own tiles are promised to agree.
  std::string_view arithmetic = {};
  bool is_reference = false;  // supports everything, and serves where no other row does

  std::unique_ptr<ExpertsKernel> (*make)(const ExpertsProblem& problem) = nullptr;

  // Those of a row of a GPU, the best guess for few tokens first; a single launch has none.
  std::span<const DeviceTile> (*tiles)(const ExpertsProblem& problem) = nullptr;
  std::unique_ptr<DeviceExpertsKernel> (*make_on_device)(const ExpertsProblem& problem,
                                                         const DeviceExperts& weights,
                                                         const DeviceTile& tile) = nullptr;
  // Memory of a GPU beside input and output, for calls of up to `tokens`, with any tile.
  size_t (*workspace_bytes)(const ExpertsProblem& problem, int64_t tokens) = nullptr;
  TileCost cost = {};
  bool adds_rows = false;  // takes DeviceExpertsCall::sums, with all of its tiles

  OneLaunchReach (*one_launch)(const ExpertsProblem& problem) = nullptr;
  std::unique_ptr<OneLaunchKernel> (*make_one_launch)(const ExpertsProblem& problem,
                                                      const DeviceExperts& weights) = nullptr;

  bool is_one_launch() const { return make_one_launch != nullptr; }
};

// The rows of a device, in order of preference; one of them is the reference. A build without CUDA
// has none for a GPU.
Catalog<KernelRow> kernel_catalog(DeviceKind device);

}  // namespace conclave::inline v0::experts
