// Scales rounded to the type that files have them in.
#pragma once

#include "conclave/dtype.h"
#include "conclave/error.h"
#include "conclave/spec.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0::quant {

// Whether scales may have this type: f32, f16, bf16, e4m3 or e8m0.
Support is_scale_type(DType dtype);
// The type of scales that lie in tensors of this one: bytes beside codes of floats are exponents,
// as packages have them that do not know e8m0. Beside a number of the whole matrix they may be
// floats as well, and are no scales.
DType scale_type_of(DType codes, const QuantSpec& quant, DType stored);
// Says what scales of the type are for sure; and the type of such scales.
ScaleValues values_of_scales(DType dtype);
DType type_of_scales(ScaleValues values);
// The number of a byte, where the type has bytes.
float scale_of_byte(DType type, uint8_t byte);
// The largest scale of the type.
float largest_scale(DType dtype);
// A positive number as a scale: nearest, or the next power of two for e8m0, which has no others.
// A number beyond the type's range becomes its largest, or smallest positive, one; 0 becomes 1.
float round_scale(DType dtype, float value);
// Appends scales that round_scale gave.
void append_scales(DType dtype, std::span<const float> scales, std::vector<std::byte>& bytes);

}  // namespace conclave::inline v0::quant
