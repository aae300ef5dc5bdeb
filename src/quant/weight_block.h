// Blocks of a source's matrices in memory: in place if the source offers views, otherwise copies.
#pragma once

#include "conclave/tensor.h"
#include "conclave/weights.h"

#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0 {

struct BlockRequest {
  WeightId id = weights::kGate;
  int64_t expert = 0;
  WeightBlock block;
  bool wanted = true;  // false: an empty view
};

// True if a block of the view can be a view: its rows begin with a byte.
bool begins_bytes(const ConstTensorView& whole, const WeightBlock& block);
// The block in place. Its rows must begin with a byte.
ConstTensorView block_of_view(const ConstTensorView& whole, const WeightBlock& block);

// One worker's memory for the blocks it works on. It grows to the largest set of copies asked for.
// Blocks in place are given back to the source when they are no longer valid, so that a mapped file
// is never resident beside what is made of it.
class BlockLoader {
 public:
  explicit BlockLoader(const WeightSource& source) : source_(source) {}
  BlockLoader(BlockLoader&&) noexcept = default;
  ~BlockLoader() { release(); }

  // views[i] is [rows, cols] of requests[i], possibly strided; valid until the next load.
  void load(std::span<const BlockRequest> requests, std::span<ConstTensorView> views);
  // Loads the whole matrix.
  ConstTensorView load(WeightId id, int64_t expert);

 private:
  void release();

  const WeightSource& source_;
  Tensor memory_;
  std::vector<BlockRequest> in_place_;
};

// Loads a vector of the source, widened to float32.
std::vector<float> load_vector(const WeightSource& source, WeightId id);

}  // namespace conclave::inline v0
