// The words that the kernels of this folder share.
//
// product   one of an expert's two: up (gate and up, or up alone) with the activation, or down
// item      a block's piece of a product: token rows of one expert times a tile of weight rows
// walk      the order in which blocks take items, from an item's number to the item. A block takes
//           fixed turns, or draws numbers (tickets) from a counter
// ring      slots of shared memory, each with a barrier that says it is full and one for empty
// producer  warps or a thread that fill the ring; consumers multiply what is in it
// epilogue  turns the sums of an item into results, in registers
// store     takes results to memory: to sorted rows, to rows of slots, or added to rows of tokens
#pragma once

#include "quant/activation_rows.h"

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::cuda::device {}

namespace conclave::inline v0::experts {

namespace ptx = cuda::device;

enum class Product : uint8_t {
  kUp,        // gate and up, or up alone: the parameters say which
  kUpGated,   // weight rows in turn: 8 of gate, 8 of up, 8 of gate...
  kUpPlain,   // up alone
  kDown,      // from sorted rows of the intermediate to the rows of their slots
  kDownSums,  // the same, weighted and added to the float32 rows of the slots' tokens
};
constexpr bool is_up(Product product) {
  return product != Product::kDown && product != Product::kDownSums;
}

// Scales of products of codes of a byte. kBlock: one per 128x128 block of weights and one per token
// row and 128 columns. kRow: one per weight row and one per token row.
enum class Scaling : uint8_t { kNone, kRow, kBlock };

// Rows and columns of a block of weights that shares a scale, and columns of a token row.
inline constexpr int32_t kScaleGroup = static_cast<int32_t>(quant::kActivationGroup);

// The most shared memory that a block on Hopper may have: 227 KiB.
inline constexpr size_t kMostSharedBytes = 232448;

}  // namespace conclave::inline v0::experts
