// A layer asks its experts' kernels to solve such a problem, on any device.
#pragma once

#include "activation/activations.h"
#include "cpu/isa.h"
#include "cuda/device_info.h"

#include "conclave/dtype.h"
#include "conclave/spec.h"

#include <cstdint>
#include <variant>

namespace conclave::inline v0::experts {

// The CPU as its kernels see it.
struct CpuTarget {
  cpu::Isa isa = cpu::Isa::kScalar;                       // the best that is allowed
  cpu::Arithmetic arithmetic = cpu::Arithmetic::kF32Fma;  // chosen by table or forced
  int64_t most_tokens = int64_t{1} << 40;                 // in one call
  bool permutes_bytes = true;                             // has avx512_vbmi
  bool has_avx_vnni = false;
};

// The device that runs the experts.
using Target = std::variant<CpuTarget, cuda::DeviceInfo>;

inline int64_t most_tokens(const Target& target) {
  return std::visit([](const auto& device) { return device.most_tokens; }, target);
}

// On a GPU, codes whose columns have an order lie so that those of a group are neighbours.
struct OrderedColumns {
  int64_t gate_up_group = 0;  // columns that share factors; 0: codes lie as they are stored
  int64_t down_group = 0;
  int64_t gate_up = 0;   // columns of gate's and up's rows
  int64_t up_begin = 0;  // the first of up's own columns; 0: gate and up have one order
};

struct ExpertsProblem {
  int64_t num_local_experts = 0;
  int64_t hidden_size = 0;        // H: width of the rows the experts read and write
  int64_t intermediate_size = 0;  // I
  int64_t top_k = 0;
  int64_t max_tokens = 0;
  int64_t max_adapter_rank = 0;  // the most that a matrix has; 0: no row has an adapter
  DType weight_dtype = DType::kBF16;
  QuantSpec quant = {};  // for weights that are codes
  // Columns of down's first block of scales that other ranks hold: slices begin anywhere.
  int64_t skipped_columns = 0;
  // Rows of gate's and up's first block of scales that other ranks hold.
  int64_t skipped_rows = 0;
  // Columns of down over all ranks, whose groups orders of columns name; 0: those of this one.
  int64_t whole_intermediate_size = 0;
  // Groups are filled up with places without a column; intermediate_size counts these, too.
  OrderedColumns ordered = {};
  // The most powers of two that scales of a matrix lie apart, where these are powers and a plan has
  // looked at them.
  int32_t scale_span = 0;
  bool has_float_rows = false;  // a projection makes the rows, in float32
  activation::Activation activation = {};
  bool has_bias = false;
  // Weights are values, and may lie as their owner has them instead of in panels.
  bool reads_in_place = false;
  // A part of plain weights that runs by the row of experts that quantise theirs, and reads the
  // same rows: float32.
  bool is_beside_quantised_rows = false;
  Target target = CpuTarget{};

  // Columns of the rows that gate and up multiply.
  int64_t input_columns() const { return ordered.gate_up == 0 ? hidden_size : ordered.gate_up; }

  // The target, whose kind the caller knows: rows are asked about problems of their own device.
  const CpuTarget& cpu() const { return std::get<CpuTarget>(target); }
  const cuda::DeviceInfo& gpu() const { return std::get<cuda::DeviceInfo>(target); }
};

}  // namespace conclave::inline v0::experts
