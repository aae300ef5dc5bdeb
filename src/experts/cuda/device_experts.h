// The experts seam on the GPU: weights as they lie in device memory, one call's tensors, and the
// abstract kernel. No CUDA header, so that planning code compiles everywhere.
#pragma once

#include "core/device_flow.h"
#include "experts/problem.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

struct CUstream_st;

namespace conclave::inline v0::experts {

// These give codes a meaning to kernels that decode them for tensor cores, w = (value - zero) scale
// or w = value scale - offset: [E, groups of columns, parts, row_stride], where gate and up are two
// parts and down is one.
struct FactorPlanes {
  const float* scales = nullptr;
  const void* zeros = nullptr;     // bf16; null without zero points
  const float* offsets = nullptr;  // null without offsets
  int64_t columns = 0;             // that share factors; 0: all
  int64_t groups = 0;
  int64_t parts = 0;
  int64_t rows = 0;        // each part has
  int64_t row_stride = 0;  // elements, a multiple of 8
  // CodeOrder::kLanesOfNumbers has this: not 0 if is_short_scale holds for all scales or, where
  // kernels multiplies_steps, is_short_step for all of these.
  const int32_t* short_scales = nullptr;
  // FactorForm::kExact has these instead of the numbers above: bytes of scales, [E, groups,
  // byte_stride] with rows as exact_row says, a ByteForm for all of them, and [E, parts] numbers
  // that multiply sums.
  const void* bytes = nullptr;
  const int32_t* byte_form = nullptr;
  const float* sum_factors = nullptr;
  int64_t byte_stride = 0;  // a multiple of 16
  // FactorForms that has_steps have these instead: pairs of bytes, each a step more by 128, [E,
  // step_pairs, parts, row_stride], and the float32 numbers by which those of scales, and of
  // offsets, are multiplied, [E, units, parts, row_stride].
  const void* steps = nullptr;
  const void* step_units = nullptr;
  int64_t units = 0;  // along the columns
};

// A matrix of all experts, [E, rows, stride], and what belongs to its rows; null where there is
// none.
struct DeviceExpertMatrix {
  const void* data = nullptr;
  int64_t stride = 0;           // from row to row, in elements; a multiple of 16 bytes
  const float* bias = nullptr;  // [E, rows]
  // Scales of codes. WeightScale::kBlock: those of the blocks of gate, of up, and of down, as
  // stored; otherwise one per row (kTensor is widened at create), [E, rows].
  const float* scale = nullptr;
  // Offsets of codes, which lie as their scales do: w = code * scale - offset. Null without zeros.
  const float* offset = nullptr;
  // For kernels that read factors in the place of scales and offsets; each kind is there if a
  // kernel of the layer reads it.
  FactorPlanes factors = {};
  // Kernels multiply the columns of activated rows by these, [E, I], of down; gate's and up's rows
  // come multiplied. Null without such factors.
  const float* column_factors = nullptr;
};

// Weights in the canonical layout, which every kernel reads in place: none packs. Columns beyond H
// (gate_up) or I (down) are never used.
struct DeviceExperts {
  DeviceExpertMatrix gate_up;  // 2I rows: I gate rows, then I up rows; I without a gate
  DeviceExpertMatrix down;     // H rows
  // With ActivationScale::kTensorStatic: [1] each, the quantisation steps of input and
  // intermediate.
  const float* input_scale = nullptr;
  const float* intermediate_scale = nullptr;
};

// Makes results what combine would make of a token's only row: rounded, weighted, scaled, rounded
// again. Only kernels with finishes_rows() take it.
struct OutputWeights {
  bool apply = false;
  const float* weights = nullptr;  // per slot; null: all 1
  float scale = 1;
};

// Target of rows that are added up instead of stored: slot s's row, rounded as for storing and
// times its weight, is added to row s / top_k, in any order. Only `DeviceKernelRow`s with
// `adds_rows` take it.
struct RowSums {
  float* rows = nullptr;           // [T, stride], zeroed by the caller; null: rows are stored
  int64_t stride = 0;              // elements; a multiple of 16 bytes
  const float* weights = nullptr;  // per slot; null: all 1
};

// One forward's expert MLPs. Row r of the grouping reads token row_slot[r] / top_k of `input`, or
// row r of it if the kernel's tile has sorted_input, and writes its result to row row_slot[r] of
// `output`; other rows of `output` are not written. Sorted rows may lie where `output` does: they
// are read before the first result is written.
// Kernels may read `groups` before they wait for the launch in front of them, which must itself
// have waited for the grouping (quantize_rows_cuda, clear_sums and spread_rows do).
struct DeviceExpertsCall {
  DeviceRows input;
  GroupedRows groups;
  // Weight of the slot's input row (WeightOn::kInput), per slot [T * k], or null. It multiplies the
  // gate and up products before their bias.
  const float* input_weights = nullptr;
  void* workspace = nullptr;  // the row's workspace_bytes; 256-byte aligned
  // [T * k, output_stride] kBF16; kF16 for kF16 weights, kF32 for kF32 weights.
  void* output = nullptr;
  int64_t output_stride = 0;  // elements
  OutputWeights finish = {};
  RowSums sums = {};  // if given, `output` gets no results
};

// How a kernel cuts its products. Plain numbers: printable, comparable, tunable.
struct DeviceTile {
  int32_t tokens = 0;    // rows of a token tile
  int32_t features = 0;  // weight rows of a tile
  int32_t depth = 0;     // bytes of K per stage
  int32_t stages = 0;    // in the shared-memory ring
  int32_t cluster = 1;   // blocks that share weights
  int32_t blocks_per_sm = 1;
  bool sorted_input = false;  // reads rows that were copied into sorted order
  friend bool operator==(const DeviceTile&, const DeviceTile&) = default;
};
std::string to_string(const DeviceTile& tile);  // "128x256x128B, 4 stages, cluster 2"
// The inverse. Throws Error(kInvalidArgument) naming the text.
DeviceTile parse_tile(std::string_view text);

// Immutable after make; run may be called for several streams at once with distinct workspaces.
class DeviceExpertsKernel {
 public:
  virtual ~DeviceExpertsKernel() = default;
  virtual int32_t tile_tokens() const = 0;  // rows per tile of GroupedRows
  // True if the kernel takes DeviceExpertsCall::finish.
  virtual bool finishes_rows() const { return false; }
  virtual std::string describe() const = 0;  // "cuda.stream_sm90 32x128x128B, 6 stages"
  // Enqueues gate/up with activation, then down, as launches that overlap with what precedes them;
  // it neither allocates nor synchronises. The result of a row depends only on that row and its
  // expert's weights, whatever the tile it falls into.
  virtual void run(const DeviceExpertsCall& call, CUstream_st* stream) const = 0;
};

}  // namespace conclave::inline v0::experts
