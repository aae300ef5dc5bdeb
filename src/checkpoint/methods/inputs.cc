#include "checkpoint/methods/inputs.h"

#include "checkpoint/name_list.h"
#include "core/float_convert.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>

namespace conclave::inline v0::checkpoint {
namespace {

template <class T>
void transpose_as(std::span<const std::byte> stored, int64_t rows, int64_t cols,
                  std::span<std::byte> plane) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      const T value = value_at<T>(stored, row * cols + col);
      std::memcpy(plane.data() + (col * rows + row) * static_cast<int64_t>(sizeof(T)), &value,
                  sizeof(T));
    }
  }
}

}  // namespace

int64_t index_at(const PlaneInput& input, int64_t index) {
  if (input.info->dtype == DType::kI64) return value_at<int64_t>(input.bytes, index);
  return value_at<int32_t>(input.bytes, index);
}

float float_at(const PlaneInput& input, int64_t index) {
  switch (input.info->dtype) {
    case DType::kF16:
      return f16_to_float(value_at<uint16_t>(input.bytes, index));
    case DType::kBF16:
      return bf16_to_float(value_at<uint16_t>(input.bytes, index));
    default:
      return value_at<float>(input.bytes, index);
  }
}

void set_float(std::span<std::byte> plane, int64_t index, float value) {
  std::memcpy(plane.data() + index * static_cast<int64_t>(sizeof(value)), &value, sizeof(value));
}

void transpose(const PlaneInput& input, int64_t rows, int64_t cols, std::span<std::byte> plane) {
  transpose(input.bytes, byte_size(input.info->dtype), rows, cols, plane);
}

void transpose(std::span<const std::byte> array, int64_t element_bytes, int64_t rows, int64_t cols,
               std::span<std::byte> out) {
  switch (element_bytes) {
    case 1:
      return transpose_as<uint8_t>(array, rows, cols, out);
    case 2:
      return transpose_as<uint16_t>(array, rows, cols, out);
    default:
      return transpose_as<uint32_t>(array, rows, cols, out);
  }
}

void check_input(const PlaneInput& input, std::span<const DType> types,
                 const StoredShapes& shapes) {
  const TensorInfo& info = *input.info;
  const auto has_shape = [&](const std::vector<int64_t>& shape) {
    const std::span<const int64_t> found(info.shape);
    const size_t stack = found.size() > shape.size() ? 1 : 0;
    if (!std::ranges::equal(found.subspan(stack), shape)) return false;
    // A list of numbers is a stack only where one of them was handed over.
    int64_t bytes = byte_size(info.dtype);
    for (const int64_t size : shape) bytes *= size;
    return input.bytes.size() == static_cast<size_t>(bytes);
  };
  if (std::ranges::find(types, info.dtype) == types.end()) {
    throw Error(ErrorCode::kTensorDType, {.what = "a tensor of quantised weights has another type",
                                          .file = std::string(input.file),
                                          .tensor = info.name,
                                          .expected = std::string(to_string(types.front())),
                                          .found = std::string(to_string(info.dtype))});
  }
  if (std::ranges::any_of(shapes, has_shape)) return;
  throw Error(ErrorCode::kTensorShape,
              {.what = "a tensor of quantised weights does not fit its matrix",
               .file = std::string(input.file),
               .tensor = info.name,
               .expected = render_shape(shapes.front()),
               .found = render_shape(info.shape)});
}

void reject_value(const PlaneInput& input, std::string_view what, int64_t expected, int64_t found) {
  throw Error(ErrorCode::kTensorValue, {.what = fmt::format("{} has another value", what),
                                        .file = std::string(input.file),
                                        .tensor = input.info->name,
                                        .expected = fmt::format("{}", expected),
                                        .found = fmt::format("{}", found)});
}

void reject_words(std::string_view file, const TensorInfo& tensor) {
  throw Error(
      ErrorCode::kTensorShape,
      {.what = "codes may lie over the ends of words or have whole words, and neither the "
               "shapes of the layer nor the configuration tells",
       .file = std::string(file),
       .tensor = tensor.name,
       .expected = "a matrix of the layer whose shape fits one of the two, or the package's "
                   "version in the configuration",
       .found = render_shape(tensor.shape),
       .hint = "quantise the model again with compressed-tensors 0.17 or later"});
}

}  // namespace conclave::inline v0::checkpoint
