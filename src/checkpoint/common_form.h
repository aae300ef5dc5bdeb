// The form in which matrices that are stored in several ways are read as one: it holds every value
// of each. docs/quantisation.md has the table.
#pragma once

#include "conclave/dtype.h"
#include "conclave/spec.h"

#include <span>

namespace conclave::inline v0::checkpoint {

// Codes and what they mean; or values, where the type is plain.
struct MatrixMeaning {
  DType element = DType::kF32;
  QuantSpec quant = {};

  friend bool operator==(const MatrixMeaning&, const MatrixMeaning&) = default;
};

struct CommonForm {
  MatrixMeaning meaning;
  bool keeps_rows = true;  // false: some file asks for rows that become codes, and these do not
};

// For one or more meanings. With several, be they equal, scales and offsets are float32 numbers,
// the global scale and zero points being a part of them, which is how layers take them.
CommonForm common_form(std::span<const MatrixMeaning> meanings);

// Matrices with some of the meanings of a layer may be known to have less than its form.
MatrixCodes known_codes(std::span<const MatrixMeaning> meanings, const MatrixMeaning& layer);

}  // namespace conclave::inline v0::checkpoint
