// Decoders of planes share these: values at any address, transposed arrays, and errors that name
// the tensor.
#pragma once

#include "checkpoint/methods/method.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace conclave::inline v0::checkpoint {

inline constexpr std::array kByteTypes = {DType::kU8};
inline constexpr std::array kFloatTypes = {DType::kF32, DType::kF16, DType::kBF16};
inline constexpr std::array kIndexTypes = {DType::kI32, DType::kI64};

// Element `index` of an array that may lie at any address.
template <class T>
T value_at(std::span<const std::byte> bytes, int64_t index) {
  T value{};
  std::memcpy(&value, bytes.data() + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}
// The same of int32 or int64, and of f32, f16 or bf16.
int64_t index_at(const PlaneInput& input, int64_t index);
float float_at(const PlaneInput& input, int64_t index);
void set_float(std::span<std::byte> plane, int64_t index, float value);

// Writes an array [rows, cols] as [cols, rows], whatever the type of its elements.
void transpose(const PlaneInput& input, int64_t rows, int64_t cols, std::span<std::byte> plane);
void transpose(std::span<const std::byte> array, int64_t element_bytes, int64_t rows, int64_t cols,
               std::span<std::byte> out);

// Throws Error(kTensorDType, kTensorShape) unless a tensor beside the one that has the plane has
// one of the types and shapes. Stacks have another axis in front.
void check_input(const PlaneInput& input, std::span<const DType> types, const StoredShapes& shapes);
// Throws Error(kTensorValue) for a number that differs from what it must be.
[[noreturn]] void reject_value(const PlaneInput& input, std::string_view what, int64_t expected,
                               int64_t found);
// Throws Error(kTensorShape) for a tensor whose codes may lie in words in two ways.
[[noreturn]] void reject_words(std::string_view file, const TensorInfo& tensor);

}  // namespace conclave::inline v0::checkpoint
