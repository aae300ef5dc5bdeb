// The kernels of the experts on every device: a kind of row for each kind of kernel.
#pragma once

#include "core/catalog.h"
#include "cuda/device_rates.h"
#include "experts/problem.h"

#include "conclave/dtype.h"
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

// The tokens of the calls that a row of one launch can take, of those that it should take where
// nothing has been measured, and of those for which entries of tuning tables may name it, whatever
// the problem.
struct OneLaunchReach {
  int64_t most = 0;
  int64_t preferred = 0;
  int64_t measured = 0;
};

// The choice of a tile asks for two numbers: the share of the device's rate of products
// (`products`) that full tiles reach, and the share of its memory's rate at which weights are read
// for few rows.
struct TileCost {
  cuda::DeviceRate products = &cuda::DeviceRates::tensor16_teraflops;
  double product_share = 0;
  double memory_share = 0;
  int32_t row_step = 0;  // step in which an expert's last rows are computed; 0: a quarter tile
  // Share of L2's rate at which tiles get their weights, if it is not the whole of it: where each
  // tile decodes them anew, it also adds to the time of products.
  double decode_share = 0;
  // Share of the time that tiles of 256 weight rows take where they fill the device as well as
  // those of 128; else 0.
  double wide_share = 0;
  // The same for tiles with sorted_input, if these are kernels of another shape; else 0.
  double sorted_product_share = 0;
  double sorted_memory_share = 0;
  int32_t sorted_row_step = 0;
  int32_t sorted_end_depth = 0;  // time of a product's end, in elements of K
};

// Rows of every kind begin so.
struct KernelRow {
  std::string_view name;  // "cpu.avx512", "cuda.stream_sm90"
  // Asked about problems of the catalog's device only.
  Support (*supports)(const ExpertsProblem& problem) = nullptr;
};

// A kernel of a CPU.
struct HostKernel {
  // Kernels with the same text give an expert's result for a token row the same bits, in whichever
  // tile, as D2 needs.
  std::string_view arithmetic = {};
  bool is_reference = false;  // supports everything, and serves where no other row does
  std::unique_ptr<ExpertsKernel> (*make)(const ExpertsProblem& problem) = nullptr;
};

// A kernel of a GPU, in tiles.
struct DeviceKernel {
  std::string_view arithmetic = {};  // as above
  bool is_reference = false;
  // The best guess for few tokens first; never empty.
  std::span<const DeviceTile> (*tiles)(const ExpertsProblem& problem) = nullptr;
  std::unique_ptr<DeviceExpertsKernel> (*make)(const ExpertsProblem& problem,
                                               const DeviceExperts& weights,
                                               const DeviceTile& tile) = nullptr;
  // Memory of a GPU beside input and output, for calls of up to `tokens`, with any tile.
  size_t (*workspace_bytes)(const ExpertsProblem& problem, int64_t tokens) = nullptr;
  TileCost cost = {};
  bool adds_rows = false;  // takes DeviceExpertsCall::sums, with all of its tiles
  // Reads DeviceExpertMatrix::factors in the place of scales and offsets. Rows are then of the type
  // that codes become on their way.
  bool reads_factors = false;
  DType decoded = DType::kBF16;
  // Reads quantised rows as values of bf16, where these hold them (quant/gpu_rows.h).
  bool reads_values = false;
  // Decodes CodeOrder::kLanesOfFloats to bytes: codes of rows lie in their order
  // (QuantizeRowsCuda::in_lanes), and scales of a matrix within kMostNearSpan of each other.
  bool decodes_lanes = false;
};

// The whole forward of few tokens at once (one_launch.h), beside a kernel in tiles, which serves
// the calls that ask for more than a weighted sum.
struct OneLaunch {
  OneLaunchReach (*reach)(const ExpertsProblem& problem) = nullptr;
  std::unique_ptr<OneLaunchKernel> (*make)(const ExpertsProblem& problem,
                                           const DeviceExperts& weights) = nullptr;
  size_t (*workspace_bytes)(const ExpertsProblem& problem, int64_t tokens) = nullptr;  // as above
};

struct HostKernelRow : KernelRow, HostKernel {};
struct DeviceKernelRow : KernelRow, DeviceKernel {};
struct OneLaunchRow : KernelRow, OneLaunch {};

// Rows in order of preference; among host and among device kernels one is the reference. A build
// without CUDA has none for a GPU.
Catalog<HostKernelRow> host_kernels();
Catalog<DeviceKernelRow> device_kernels();
Catalog<OneLaunchRow> one_launch_kernels();

// Rows for a GPU whose folder this build leaves out, since CONCLAVE_CUDA_ARCHITECTURES lacks what
// it is compiled for: they support nothing, and say what is missing.
std::span<const KernelRow> left_out_kernels();

// The part that rows of all kinds have, of the GPU's row of this name, also of one that is left
// out. Throws Error(kUnknownName) listing the names of both kinds.
KernelRow find_device_row(std::string_view name);

}  // namespace conclave::inline v0::experts
