// The content of a MoE layer's tensors, and the names by which they are known.
#pragma once

#include "conclave/weights.h"

#include <cstdint>
#include <span>
#include <string_view>

namespace conclave::inline v0::checkpoint {

// The content of a tensor.
enum class Part : uint8_t {
  kGate,
  kUp,
  kDown,
  kGateUp,
  kGateBias,
  kUpBias,
  kDownBias,
  kGateUpBias,
  kRouter,
  kRouterBias,
  kSelectionBias,
  kExpertScale,
  kGlobalScale,
  kRouterInputScale,
  kRouterTensor0,  // weights::router_tensor(0)
  kRouterTensor1,
  kRouterTensor2,
  kRouterTensor3,
  kRouterTensor4,
  kRouterTensor5,
  kRouterTensor6,
  kRouterTensor7,
  kSharedGate,
  kSharedUp,
  kSharedDown,
  kSharedGateUp,
  kSharedGateBias,
  kSharedUpBias,
  kSharedDownBias,
  kSharedExpertGate,
  kMixGate,
  kMixGateBias,
  kLatentDown,
  kLatentNorm,
  kLatentUp,
  kOutputBias,
  kResidualGate,
  kResidualUp,
  kResidualDown,
  kNotRead,  // known, but no part of what a layer computes
};
// Whether the part belongs to routed experts; all others exist once per layer.
bool is_expert_part(Part part);

// The tensor fills these ids one after the other; none for kNotRead.
std::span<const WeightId> ids_of(Part part);

// The order of a matrix's rows in its tensor.
enum class RowOrder : uint8_t {
  kConcatenated,  // gate rows, then up rows
  kInterleaved,   // gate 0, up 0, gate 1, up 1, ...
};
// Which axis comes first. With kByShape it is rows, unless the shape of a stack says otherwise.
enum class AxisOrder : uint8_t { kByShape, kRowsFirst, kColsFirst };
// Whether the experts of a stack have an axis of their own.
enum class ExpertAxis : uint8_t {
  kOwn,     // [E, rows, cols]
  kMerged,  // [E * rows, cols]
};

// A tensor name after "layers.N.". {base} is one of the family's bases. With {expert} (a decimal
// number) the tensor is one matrix [rows, cols]; without it, an expert part is a stack [E, rows,
// cols] or [E, cols, rows], with the first two axes merged if the pattern says so.
struct NamePattern {
  std::string_view text;
  Part part;
  RowOrder rows = RowOrder::kConcatenated;
  AxisOrder axes = AxisOrder::kByShape;
  // The vector is row `row` of a tensor with this many rows; the others belong to other modalities.
  int64_t rows_beside = 1;
  int64_t row = 0;
  ExpertAxis experts = ExpertAxis::kOwn;
  bool is_one_row = false;  // engines take the vector as a matrix of one row
};

// One way of storing the routed experts. A layer uses exactly one.
struct ExpertForm {
  std::string_view name;  // "per_expert", "stacked"
  std::span<const NamePattern> patterns;
};

}  // namespace conclave::inline v0::checkpoint
