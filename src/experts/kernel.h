// The experts seam on the CPU: per-expert MLP on a batch of rows (gate and up product, activation,
// down), from weights that the kernel has packed. On a GPU: experts/cuda/device_experts.h.
#pragma once

#include "core/flow.h"
#include "experts/adapters/factors.h"

#include "conclave/context.h"
#include "conclave/dtype.h"
#include "conclave/tensor.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace conclave::inline v0::experts {

// Format of the rows that the kernel reads.
struct BatchRequirements {
  DType row_dtype = DType::kF32;  // kF32 or kBF16
  int64_t row_bytes = 0;          // per RowBundle row: zero padded, a multiple of 64
};

// A matrix of an expert, dense row-major in the problem's weight dtype, and what belongs to it.
struct ExpertMatrix {
  ConstTensorView weights;      // [rows, cols]; empty: there is no such matrix
  ConstTensorView bias = {};    // [1, rows] f32, f16 or bf16; empty: zeros
  ConstTensorView scale = {};   // [rows, scales] f32, for codes
  ConstTensorView offset = {};  // as many, for codes with zeros
  ConstTensorView order = {};   // [1, cols] int32
  ConstTensorView factor = {};  // [1, cols] f32
};

// One expert: gate and up [I, H], down [H, I]; without a gate where the activation has none. Rows
// of codes have either one scale or one for each block of QuantSpec::block_cols columns, the first
// of down less the skipped ones. Orders of columns name the scale of each column; each row then has
// all scales of the matrix. Gate has the factors of up.
struct ExpertMatrices {
  ExpertMatrix gate;
  ExpertMatrix up;
  ExpertMatrix down;
};

// Sizes of what `pack` writes for one expert: one contiguous slab per matrix.
struct SlabBytes {
  size_t gate_up = 0;
  size_t down = 0;
};

// Rows of gate and up, and rows of down, that fill one panel, and the bytes of such panels: an
// expert can be packed in parts of whole granules.
struct PackGranule {
  int64_t inner_rows = 0;
  int64_t hidden_rows = 0;
  size_t gate_up_bytes = 0;
  size_t down_bytes = 0;
};

// The slabs of all local experts: one right behind the other, or each where a table says.
struct Slabs {
  Slabs() = default;
  Slabs(const std::byte* first_slab) : first(first_slab) {}
  explicit Slabs(const std::byte* const* table) : each(table) {}

  const std::byte* first = nullptr;
  const std::byte* const* each = nullptr;  // [experts], in place of `first`
};

struct PackedExperts {
  Slabs gate_up = {};
  Slabs down = {};
  // In place of slabs, where the kernel's problem says so: each local expert where others have it.
  std::span<const ExpertMatrices> in_place = {};
  // The adapter of mark m at m - 1 (experts/adapters/factors.h); empty: no row has one.
  std::span<const MlpAdapter* const> adapters = {};
  // The quantisation steps of input and activated rows, where a checkpoint states them.
  float input_scale = 1;
  float intermediate_scale = 1;
};

// Immutable after make; every member is safe to call from several threads.
class ExpertsKernel {
 public:
  virtual ~ExpertsKernel() = default;

  virtual BatchRequirements requirements() const = 0;
  virtual SlabBytes slab_bytes() const = 0;  // multiples of 64; also the strides between experts
  virtual std::string packed_layout() const = 0;  // "panel64.k2.v1"
  virtual std::string tile() const = 0;           // "6x64"
  virtual PackGranule pack_granule() const = 0;
  // Slabs are 64-byte aligned; every byte of the panels that the given rows fill is written. To
  // pack part of an expert, the caller passes its rows from a granule's boundary on, and slabs
  // advanced to its panels; empty matrices are skipped. Orders and factors of columns belong to
  // a slab as a whole: they come with its first rows, and only with these. Throws
  // Error(kTensorValue), without a tensor's name, for a scale or offset that QuantSpec rules out.
  virtual void pack(const ExpertMatrices& expert, std::byte* gate_up_slab,
                    std::byte* down_slab) const = 0;
  // Bytes for at most `max_slots` occupied slots, however the experts share them, and an executor
  // of `workers`.
  virtual size_t workspace_bytes(int64_t max_slots, int32_t workers) const = 0;
  // Writes output row s for each occupied slot s of the batch, and no other. Each row depends only
  // on its own input row and its expert's weights: bit-identical in every batch (D2).
  // Runs two to four parallel regions and allocates nothing. `workspace` has
  // workspace_bytes(max_slots, executor.concurrency()).
  virtual void run(const ExpertBatch& batch, const PackedExperts& weights,
                   const ExpertOutput& output, std::span<std::byte> workspace,
                   Executor& executor) const = 0;
};

}  // namespace conclave::inline v0::experts
