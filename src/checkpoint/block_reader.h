// Reads a block of a matrix from its tensor, whatever the strides.
#pragma once

#include "checkpoint/placement.h"
#include "checkpoint/tensor_data.h"

#include "conclave/weights.h"

#include <cstddef>
#include <span>

namespace conclave::inline v0::checkpoint {

// Throws Error(kShape) if the block does not lie in the matrix, or has another size than the
// destination.
void check_block(const WeightInfo& info, const WeightBlock& block, size_t destination_bytes);

// The bytes of a view from a block's first element to its last.
struct ByteRange {
  uint64_t begin = 0;
  uint64_t end = 0;

  uint64_t size() const noexcept { return end - begin; }
};
ByteRange bytes_of_block(const ConstTensorView& whole, const WeightBlock& block);

// Writes the block, dense and row-major, to `destination`, which has exactly its size and is not
// empty. Reads no element of the tensor twice, and few besides those of the block.
void read_block(const TensorData& data, const MatrixLocation& matrix, const WeightBlock& block,
                size_t element_bytes, std::span<std::byte> destination);

// The same for codes narrower than a byte, whose columns lie side by side: each row of the block
// begins a byte.
void read_codes(const TensorData& data, const MatrixLocation& matrix, const WeightBlock& block,
                int64_t bits, std::span<std::byte> destination);

}  // namespace conclave::inline v0::checkpoint
