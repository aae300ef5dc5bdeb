#include "capi/tensors.h"

#include "capi/values.h"

#include "conclave/error.h"

#include <algorithm>
#include <span>
#include <string>

namespace conclave::inline v0::capi {
namespace {

Shape shape_of(const conclave_tensor& tensor, const char* name) {
  if (tensor.rank < 0 || tensor.rank > CONCLAVE_MAX_RANK) {
    throw Error(ErrorCode::kShape, {.what = "a tensor has another number of axes",
                                    .tensor = name,
                                    .found = std::to_string(tensor.rank),
                                    .limit = "0 to " + std::to_string(CONCLAVE_MAX_RANK)});
  }
  const std::span<const int64_t> dims(tensor.shape, static_cast<size_t>(tensor.rank));
  const auto negative = std::ranges::find_if(dims, [](int64_t dim) { return dim < 0; });
  if (negative != dims.end()) {
    throw Error(ErrorCode::kShape, {.what = "a tensor has a negative size",
                                    .tensor = name,
                                    .found = std::to_string(*negative),
                                    .limit = "at least 0"});
  }
  return Shape(dims);
}

void check_stride(const conclave_tensor& tensor, const char* name) {
  if (tensor.row_stride == 0 || (tensor.row_stride > 0 && tensor.rank == 2)) return;
  throw Error(ErrorCode::kStride,
              {.what = "rows of this tensor cannot be apart",
               .tensor = name,
               .expected = "0, or with two axes the distance of rows",
               .found = std::to_string(tensor.row_stride) + " with " + std::to_string(tensor.rank) +
                        (tensor.rank == 1 ? " axis" : " axes")});
}

int64_t elements_of(const Shape& shape, const char* name) {
  try {
    return shape.num_elements();
  } catch (const Error& error) {
    throw Error(error.code(), {.what = "a tensor has more elements than 63 bits can count",
                               .tensor = name,
                               .found = shape.to_string()});
  }
}

}  // namespace

TensorView view_of(const conclave_tensor* tensor, const char* name) {
  // Where there is nothing to read, the view still says that the argument was given.
  static constexpr std::byte kNothing[64] = {};
  if (tensor == nullptr) return {};
  const conclave_tensor given = take(tensor, name);
  const DType dtype = dtype_of(name, given.dtype);
  const Shape shape = shape_of(given, name);
  check_stride(given, name);
  void* data = given.data;
  const int64_t elements = elements_of(shape, name);
  if (data == nullptr && elements > 0) {
    throw Error(ErrorCode::kNullPointer, {.what = "a tensor has elements and no memory",
                                          .tensor = name,
                                          .found = shape.to_string()});
  }
  if (data == nullptr) data = const_cast<std::byte*>(kNothing);
  return {.data = data, .dtype = dtype, .shape = shape, .row_stride = given.row_stride};
}

TensorView needed_view(const conclave_tensor* tensor, const char* name) {
  return view_of(&required(tensor, name), name);
}

}  // namespace conclave::inline v0::capi
