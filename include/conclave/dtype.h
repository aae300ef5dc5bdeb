// Element types as they appear in checkpoints and at the library's boundary.
#pragma once

#include "conclave/version.h"

#include <cstdint>
#include <optional>
#include <string_view>

namespace conclave::inline v0 {

enum class DType : uint8_t {
  kBool,
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kU64,
  kI64,
  kF16,
  kBF16,
  kF32,
  kF64,
  kC64,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kF4,
  kF6E2M3,
  kF6E3M2,  // from kF4 on below a byte: sizes are given in bits
  kI4,      // code c, of 0 to 15, is c - 8
  kNF4,     // the 16 values of bitsandbytes' "nf4"
  kBnbFP4,  // the 16 values of bitsandbytes' "fp4", another code than kF4 (e2m1)
  kIQ4,     // the 16 whole numbers of ggml's IQ4_NL and IQ4_XS
  kU4,      // code c, of 0 to 15, is c
  kI6,      // code c, of 0 to 63, is c - 32; for MatrixCodes::dtype: no tensor has it
  kU2,      // code c, of 0 to 3, is c; likewise
};

// Bits of one element: 16 for kBF16, 4 for kF4.
CONCLAVE_API int64_t bit_size(DType dtype) noexcept;
// Bytes of one element. Throws Error(kDType) for types below a byte: those fill bytes by their
// bit_size.
CONCLAVE_API int64_t byte_size(DType dtype);
// The safetensors spelling: "BF16", "F8_E4M3".
CONCLAVE_API std::string_view to_string(DType dtype) noexcept;
// The inverse of to_string; also "bfloat16", "float16", "float32", "float64" (config.json).
CONCLAVE_API std::optional<DType> parse_dtype(std::string_view name) noexcept;

}  // namespace conclave::inline v0
