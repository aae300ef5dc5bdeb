// Scales of a matrix as bytes of the type that a layer has for them, where FactorForm::kExact
// holds bytes: as they are stored, or made of numbers that the type has.
#pragma once

#include "layer/cuda/weight_upload.h"
#include "quant/weight_block.h"

#include "conclave/spec.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

// Serves one thread.
class ScaleRows {
 public:
  // Those of the layer's QuantSpec, which outlives this as the upload does.
  ScaleRows(const QuantSpec& quant, const WeightUpload& upload);

  // Reads the scales of a block of the matrix; they are valid until the next call. Throws
  // Error(kTensorValue) naming the tensor for a scale that the type has not.
  void load(WeightId matrix, int64_t expert, const WeightBlock& block);

  int64_t rows() const { return rows_; }
  const std::byte* row(int64_t row) const { return bytes_ + row * stride_; }
  // The bytes of the least scale and of the largest one; bytes count as their numbers do, and a
  // zero has none but 0. There are none if least > most.
  uint8_t least() const { return least_; }
  uint8_t most() const { return most_; }

 private:
  bool load_bytes(WeightId matrix, int64_t expert, const WeightBlock& block);
  void load_numbers(WeightId matrix, int64_t expert, const WeightBlock& block);
  uint8_t byte_of(float scale) const;
  void find_range(int64_t groups);

  QuantSpec local_;  // says what scales are without those of whole matrices
  const WeightUpload& upload_;
  BlockLoader loader_;
  std::vector<std::byte> made_;  // bytes that are not stored
  const std::byte* bytes_ = nullptr;
  int64_t rows_ = 0;
  int64_t stride_ = 0;
  uint8_t least_ = 0;
  uint8_t most_ = 0;
};

}  // namespace conclave::inline v0
