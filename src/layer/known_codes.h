// Blocks of a layer's matrices become what QuantSpec says is known of them: codes of fewer bits,
// numbers for wider groups of columns, no zeros.
#pragma once

#include "quant/code_meaning.h"
#include "quant/weight_format.h"

#include "conclave/spec.h"
#include "conclave/tensor.h"
#include "conclave/weights.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

// A block of an expert's matrix, for errors and for the place of its columns.
struct BlockOfMatrix {
  const WeightSource& source;
  WeightId id;
  int64_t expert = 0;
  WeightBlock block = {};
};

class KnownCodes {
 public:
  // The matrix's kind decides, in a layer with codes of this type. `layer` must outlive it.
  KnownCodes(DType dtype, const QuantSpec& layer, WeightMatrix matrix);

  bool has_fewer_bits() const { return known_.dtype.has_value(); }
  // The block's codes in the type that is known, in `storage`. Throws Error(kTensorValue) for a
  // value that it does not have.
  ConstTensorView narrow(const ConstTensorView& codes, const BlockOfMatrix& place,
                         std::vector<std::byte>& storage) const;
  // Whether panels hold codes of that type.
  bool has_panels() const {
    return has_fewer_bits() && quant::find_panel_format(*known_.dtype) != nullptr;
  }
  bool has_fewer_numbers() const { return !known_.has_zeros || has_wider_groups(); }
  // The block's numbers, one for each group that is known. Throws Error(kTensorValue) where groups
  // that should share a number differ, and for a zero that is not 0.
  void narrow(const BlockOfMatrix& place, CodeMeaning& meaning) const;

 private:
  // Writes a row's codes of fewer bits, and returns the bits of all in one.
  using NarrowRow = uint8_t (*)(const std::array<uint8_t, 256>& codes, const std::byte* in,
                                int64_t cols, std::byte* out);
  NarrowRow row_narrower(int64_t stored_bits) const;
  bool has_wider_groups() const {
    return known_.block_cols != 0 && known_.block_cols != layer_.block_cols;
  }

  DType dtype_;
  const QuantSpec& layer_;
  const MatrixCodes& known_;
  // Codes of fewer bits by those of the layer; kNone where there is none of the value.
  std::array<uint8_t, 256> codes_ = {};
};

}  // namespace conclave::inline v0
