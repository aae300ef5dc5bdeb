// A block of a source's matrix in memory: the source's own where it offers one, else a copy.
#pragma once

#include "conclave/tensor.h"
#include "conclave/weights.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

class LoadedBlock {
 public:
  LoadedBlock() = default;  // an empty view
  LoadedBlock(const WeightSource& source, WeightRole role, int64_t expert,
              const WeightBlock& block);
  LoadedBlock(const LoadedBlock&) = delete;
  LoadedBlock& operator=(const LoadedBlock&) = delete;
  LoadedBlock(LoadedBlock&&) noexcept = default;
  LoadedBlock& operator=(LoadedBlock&&) noexcept = default;

  // [rows, cols] of the block, rows maybe strided. Lives as long as this and the source.
  const ConstTensorView& view() const { return view_; }

 private:
  Tensor copy_;
  ConstTensorView view_;
};

// The whole matrix.
WeightBlock whole_block(const WeightInfo& info);

// A vector of the source, widened to float32.
std::vector<float> load_vector(const WeightSource& source, WeightRole role);

}  // namespace conclave::inline v0
