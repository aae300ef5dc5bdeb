// Makes matrices of codes out of values, and values out of matrices of any kind.
#pragma once

#include "conclave/dtype.h"
#include "conclave/error.h"
#include "conclave/spec.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

enum class ScaleRule : uint8_t {
  kAmax,    // the largest magnitude over the largest code
  kSearch,  // the scale of least squared error among clipped ranges; never worse than kAmax
};

// How far codes times scales lie from the values they stand for.
struct QuantiseError {
  double squared_error = 0;  // sum of (value - code * scale)^2
  double squared_values = 0;
  // The largest |value - code * scale| in steps: distances between the two neighbouring codes. At
  // most 0.5 unless the value lies beyond the largest code.
  double worst_steps = 0;

  CONCLAVE_API void add(const QuantiseError& other);
  CONCLAVE_API double relative() const;  // sqrt(squared_error / squared_values); 0 where both are
};

// Codes and scales of neighbouring rows, as files hold them.
struct QuantisedRows {
  std::vector<std::byte> codes;   // [rows, cols], each row from a byte of its own
  std::vector<std::byte> scales;  // [scale rows, scale cols] of the scale type
  // These are float32, likewise: whole numbers for WeightZero::kPoint; for kOffset what is taken
  // from codes times scale, so that the least code stands for a number of the scale type.
  std::vector<std::byte> zeros;
  QuantiseError error;
};

struct QuantiseOptions {
  DType codes = DType::kF8E4M3;
  // Whole numbers may have fewer bits than their type: of 3 those from -4 to 3. 0: all of them.
  int64_t code_bits = 0;
  QuantSpec quant = {};  // says which values share a scale, and whether they have a zero point
  DType scale_dtype = DType::kF32;
  ScaleRule rule = ScaleRule::kAmax;
};

// Chooses scales and encodes; docs/quantisation.md has the rule. Immutable, for any threads.
class CONCLAVE_API Quantiser {
 public:
  // No for types that hold values, for orders of columns, steps of rows that come from
  // calibration, types that scales do not have, and zero points or fewer bits of codes that are no
  // whole numbers.
  static Support supports(const QuantiseOptions& options);
  // Throws Error(kUnsupported) with the reason.
  explicit Quantiser(const QuantiseOptions& options);
  Quantiser(Quantiser&&) noexcept;
  ~Quantiser();

  // Whether a number of the whole matrix comes first, its matrix_scale.
  bool needs_matrix_scale() const;
  // The rows that belong together: block_rows, or 1. All but the last call for a matrix take a
  // multiple of it.
  int64_t block_rows() const;

  // The scale of a matrix with WeightScale::kTensor, or its global scale. `largest` is the largest
  // magnitude of its values.
  float matrix_scale(float largest) const;
  // Scales to try in its place, the first being matrix_scale; one unless the rule is kSearch and
  // the matrix has one scale.
  std::vector<float> matrix_scales(float largest) const;
  // The squared error of values that have this one scale.
  double squared_error(std::span<const float> values, float scale) const;

  // values [rows, cols], finite, the first row being a multiple of block_rows in its matrix.
  // `matrix_scale` counts where needs_matrix_scale() says so.
  QuantisedRows quantise(std::span<const float> values, int64_t rows, int64_t cols,
                         float matrix_scale) const;

 private:
  struct Impl;
  std::unique_ptr<const Impl> impl_;
};

// Makes blocks of a GGUF type, which hold codes and scales together. Immutable, for any threads.
class CONCLAVE_API BlockQuantiser {
 public:
  // The types that it makes: "Q8_0", "Q4_0".
  static std::vector<std::string_view> types();
  // Throws Error(kUnknownName) for others.
  BlockQuantiser(std::string_view type, ScaleRule rule);
  BlockQuantiser(BlockQuantiser&&) noexcept;
  ~BlockQuantiser();

  // The elements of a block, of which a row has a whole number.
  int64_t block_elements() const;
  // values [rows, cols], finite. The blocks are the codes; there are no scales beside them. Under
  // kAmax they have the bytes that gguf-py makes, for the types that it makes; a scale beyond
  // float16 becomes the largest of that type. Throws Error(kTensorShape) for rows of part of a
  // block.
  QuantisedRows quantise(std::span<const float> values, int64_t rows, int64_t cols) const;

 private:
  struct Impl;
  std::unique_ptr<const Impl> impl_;
};

// The values of a block of a matrix as float32, [rows, cols]: stored values, or codes with the
// scales, zeros, orders and factors of their planes, rounded once. Throws Error(kTensorValue) for
// planes that mean nothing, Error(kTensorDType) for a type that no weights have, and as
// WeightSource::read.
CONCLAVE_API void read_values(const QuantSpec& quant, const WeightSource& source, WeightId matrix,
                              int64_t expert, const WeightBlock& block, std::span<float> values);

}  // namespace conclave::inline v0
