// Matrices inside arrays: where they begin, and how far apart their rows and columns are.
#pragma once

#include "arrays.h"

#include "conclave/weights.h"

#include <cstddef>
#include <string>
#include <vector>

namespace conclave::python {

// One id has matrices of equal shape, whose rows and columns may lie apart. Strides are in
// elements; those of codes below a byte are side by side, and rows begin with a byte.
struct MatrixArrays {
  std::vector<const std::byte*> matrices = {};  // null if not on this rank
  WeightInfo info = {};
  int64_t row_stride = 0;
  int64_t col_stride = 1;
  std::byte flips = {};  // bits that are turned over in every byte when it is read
  std::string argument = {};
};

// The matrices [E, rows, cols] of an array whose rows are axis `first_axis`: 1, or 0 for a single
// matrix.
MatrixArrays stack_of(const Array& array, int first_axis, std::string name);

// Describes bytes and words as the codes that they hold: those below a byte with the lowest bits
// first, int8 in unsigned bytes as 128 more than its value. Arrays of other types are as they are.
MatrixArrays as_codes(MatrixArrays stack, DType codes);

// The element `elements` behind `base`; null for null.
const std::byte* offset(const std::byte* base, int64_t elements, DType dtype);

std::string array_text(const MatrixArrays& stack);
[[noreturn]] void wrong_shape(const std::string& argument, std::string expected, std::string found);

}  // namespace conclave::python
