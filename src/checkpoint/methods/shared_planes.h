// Planes that several methods store alike.
#pragma once

#include "checkpoint/methods/inputs.h"
#include "checkpoint/methods/method.h"

#include <array>
#include <span>
#include <string_view>

namespace conclave::inline v0::checkpoint {

// Shapes of the planes as layers read them.
StoredShapes codes_as_read(const MatrixForm& form);
StoredShapes scales_as_read(const MatrixForm& form);
StoredShapes columns(const MatrixForm& form);  // one number a column
StoredShapes single(const MatrixForm& form);   // one number

// Two codes of half a byte, the first in the lower half.
inline constexpr std::array kPairTypes = {DType::kU8, DType::kI8};
StoredShapes pair_shapes(const MatrixForm& form);
bool fills_pairs(const MatrixForm& form);
void decode_pairs(const MatrixForm& form, std::span<const PlaneInput> inputs,
                  std::span<std::byte> plane);
// The same of rows that take so many bytes.
void decode_pairs_of(const MatrixForm& form, int64_t row_bytes, std::span<const std::byte> stored,
                     std::span<std::byte> plane);
bool has_pairs(const TensorInfo& tensor);  // by its type, under a name that plain matrices have too

constexpr StoredPlane pairs_of_codes(std::string_view suffix, std::string_view ending) {
  return {.suffix = suffix,
          .ending = ending,
          .types = kPairTypes,
          .shapes = pair_shapes,
          .has_codes = suffix == ending ? has_pairs : nullptr,
          .decode = decode_pairs,
          .lies_in_place = fills_pairs};
}

// Scales that are powers of two, as bytes with their exponents.
inline constexpr std::array kExponentTypes = {DType::kU8, DType::kF8E8M0};
constexpr StoredPlane exponents(std::string_view suffix, std::string_view ending) {
  return {.suffix = suffix,
          .ending = ending,
          .plane = WeightPlane::kScale,
          .types = kExponentTypes,
          .shapes = scales_as_read,
          .type = DType::kF8E8M0};
}

// A factor of all scales, and what all scales are divided by.
constexpr StoredPlane global_scale(std::string_view suffix, std::string_view ending) {
  return {.suffix = suffix,
          .ending = ending,
          .plane = WeightPlane::kGlobalScale,
          .types = kFloatTypes,
          .shapes = single};
}
void decode_divisor(const MatrixForm& form, std::span<const PlaneInput> inputs,
                    std::span<std::byte> plane);
void encode_divisor(const MatrixForm& form, const MatrixPlanes& planes,
                    std::span<std::byte> tensor);

// A tensor of a matrix that layers do not need.
constexpr StoredPlane unused(std::string_view suffix, std::string_view ending = ".weight") {
  return {.suffix = suffix, .ending = ending, .use = StoredPlane::Use::kUnused};
}

}  // namespace conclave::inline v0::checkpoint
