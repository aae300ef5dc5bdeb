// The seam between stored weights and those who read them: how a format's codes become float32 and
// back, and what may be done with them. docs/adding-a-format.md says how to add one.
#pragma once

#include "core/catalog.h"
#include "quant/code_values.h"

#include "conclave/dtype.h"
#include "conclave/error.h"
#include "conclave/format.h"
#include "conclave/spec.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0::quant {

// Codes of a byte, one by one: of quantised rows, and of matrices.
struct CodeBook {
  DType element;
  float largest;                     // magnitude of a code
  bool has_nan;                      // whether a code stands for NaN
  bool exact_in_bf16;                // whether bf16 holds the value of every code
  int bf16_multiplier;               // bf16 holds every value times this; 0: there is none
  WholeCodes whole;                  // the values as whole numbers, if bytes hold these
  std::optional<int> mantissa_bits;  // set for floats
  float (*decode)(uint8_t code);
  // The nearest code, ties to even; `largest` for what is beyond it, NaN for NaN if there is one.
  uint8_t (*encode)(float value);
};

// A row of the format table.
struct WeightFormat {
  std::string_view name;  // "bf16"
  DType element;          // the type of one value or code
  // Decodes columns [begin, begin + count) of a dense row, exactly. It needs no alignment.
  void (*decode)(const std::byte* row, int64_t begin, int64_t count, float* values);
  // The inverse: each value becomes the nearest that the format has, ties to even.
  void (*encode)(const float* values, int64_t begin, int64_t count, std::byte* row);

  // Null for formats that hold values; they have no scales, and rows stay as they are.
  const CodeBook* codes = nullptr;
  const CodeBook* row_codes = nullptr;  // what quantised rows become beside these weights
  Support (*takes)(const QuantSpec& quant) = nullptr;
  // What schemes of the method "compressed-tensors" call the codes: "float", "int"; empty: they do
  // not have them.
  std::string_view compressed_tensors = {};
  std::span<const WeightForm> forms = {};  // that tools offer
};

// All formats; `find` takes names that come from outside.
Catalog<WeightFormat> format_catalog();
// The format of this element type; null if there is none.
const WeightFormat* find_format(DType element) noexcept;
// The same for a type that a checked MoeSpec has.
const WeightFormat& format_of(DType element) noexcept;

// Panels hold the rows of `format_catalog`, and types of codes that no tensor has.
Catalog<WeightFormat> panel_catalog();
const WeightFormat* find_panel_format(DType element) noexcept;
const WeightFormat& panel_format_of(DType element) noexcept;

// Types that codes of a matrix may be known to have the values of (MatrixCodes::dtype): those of
// panels, and narrower ones that a GPU alone holds.
const WeightFormat* find_known_format(DType element) noexcept;
const WeightFormat& known_format_of(DType element) noexcept;

// Whether a type of codes has one for the value of every code of the other.
bool has_values_of(DType type, DType other);
// The type of scales in checkpoints of the form that the spec has, for random ones; float32 if
// tools offer no such form.
DType scale_dtype(const MoeSpec& spec);
// "F32, F16, BF16 or F8_E4M3": for messages. With `codes` false, only types that hold values.
std::string known_formats(bool codes);

}  // namespace conclave::inline v0::quant
