#include "matrix_arrays.h"

#include "conclave/error.h"

#include <utility>

namespace conclave::python {
namespace {

constexpr DType kSignedBytes = DType::kI8;  // their range begins 128 below that of unsigned ones

}  // namespace

[[noreturn]] void wrong_shape(const std::string& argument, std::string expected,
                              std::string found) {
  throw Error(ErrorCode::kShape, {.what = "weights have the wrong shape",
                                  .tensor = argument,
                                  .expected = std::move(expected),
                                  .found = std::move(found)});
}

const std::byte* offset(const std::byte* base, int64_t elements, DType dtype) {
  return base == nullptr ? nullptr : base + elements * bit_size(dtype) / 8;
}

MatrixArrays stack_of(const Array& array, int first_axis, std::string name) {
  const auto axis = static_cast<size_t>(first_axis);
  const int64_t count = first_axis > 0 ? array.shape()[0] : 1;
  MatrixArrays stack{.info = {.count = count,
                              .rows = array.shape()[axis],
                              .cols = array.shape()[axis + 1],
                              .dtype = array.dtype()},
                     .row_stride = array.strides()[axis],
                     .col_stride = array.strides()[axis + 1],
                     .argument = std::move(name)};
  const int64_t stride = first_axis > 0 ? array.strides()[0] : 0;
  for (int64_t i = 0; i < count; ++i) {
    stack.matrices.push_back(
        offset(static_cast<const std::byte*>(array.data()), i * stride, array.dtype()));
  }
  return stack;
}

std::string array_text(const MatrixArrays& stack) {
  return "[" + std::to_string(stack.info.count) + ", " + std::to_string(stack.info.rows) + ", " +
         std::to_string(stack.info.cols) + "]";
}

MatrixArrays as_codes(MatrixArrays stack, DType codes) {
  const DType stored = stack.info.dtype;
  if (stored == DType::kU8 && codes == kSignedBytes) {
    stack.info.dtype = codes;
    stack.flips = std::byte{0x80};
    return stack;
  }
  const bool holds = stored == DType::kU8 || stored == DType::kI32 || stored == DType::kU32;
  if (bit_size(codes) >= 8 || !holds) return stack;
  if (stack.info.cols > 1 && stack.col_stride != 1) {
    throw Error(ErrorCode::kStride, {.what = "codes below a byte lie apart",
                                     .tensor = stack.argument,
                                     .expected = "a stride of 1 along the last axis",
                                     .found = std::to_string(stack.col_stride),
                                     .hint = "pass a contiguous copy"});
  }
  const int64_t count = bit_size(stored) / bit_size(codes);
  stack.info.cols *= count;
  stack.info.dtype = codes;
  stack.row_stride *= count;
  stack.col_stride = 1;
  return stack;
}

}  // namespace conclave::python
