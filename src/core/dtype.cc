#include "conclave/dtype.h"

#include "conclave/error.h"

#include <array>
#include <string>

namespace conclave::inline v0 {
namespace {

struct TypeRow {
  DType dtype;
  int bits;
  std::string_view name;        // safetensors
  std::string_view torch_name;  // config.json
};

// Ordered as the enum: to_string and bit_size use it as an index.
constexpr std::array kTypes = {
    TypeRow{DType::kBool, 8, "BOOL", "bool"},
    TypeRow{DType::kU8, 8, "U8", "uint8"},
    TypeRow{DType::kI8, 8, "I8", "int8"},
    TypeRow{DType::kU16, 16, "U16", "uint16"},
    TypeRow{DType::kI16, 16, "I16", "int16"},
    TypeRow{DType::kU32, 32, "U32", "uint32"},
    TypeRow{DType::kI32, 32, "I32", "int32"},
    TypeRow{DType::kU64, 64, "U64", "uint64"},
    TypeRow{DType::kI64, 64, "I64", "int64"},
    TypeRow{DType::kF16, 16, "F16", "float16"},
    TypeRow{DType::kBF16, 16, "BF16", "bfloat16"},
    TypeRow{DType::kF32, 32, "F32", "float32"},
    TypeRow{DType::kF64, 64, "F64", "float64"},
    TypeRow{DType::kC64, 64, "C64", "complex64"},
    TypeRow{DType::kF8E4M3, 8, "F8_E4M3", "float8_e4m3fn"},
    TypeRow{DType::kF8E5M2, 8, "F8_E5M2", "float8_e5m2"},
    TypeRow{DType::kF8E8M0, 8, "F8_E8M0", "float8_e8m0fnu"},
    TypeRow{DType::kF8E4M3Fnuz, 8, "F8_E4M3FNUZ", "float8_e4m3fnuz"},
    TypeRow{DType::kF8E5M2Fnuz, 8, "F8_E5M2FNUZ", "float8_e5m2fnuz"},
    TypeRow{DType::kF4, 4, "F4", "float4_e2m1fn_x2"},
    TypeRow{DType::kF6E2M3, 6, "F6_E2M3", "float6_e2m3"},
    TypeRow{DType::kF6E3M2, 6, "F6_E3M2", "float6_e3m2"},
    TypeRow{DType::kI4, 4, "I4", "int4"},
    TypeRow{DType::kNF4, 4, "NF4", "nf4"},
    TypeRow{DType::kBnbFP4, 4, "BNB_FP4", "bnb_fp4"},
    TypeRow{DType::kIQ4, 4, "IQ4", "iq4"},
    TypeRow{DType::kU4, 4, "U4", "uint4"},
    TypeRow{DType::kI6, 6, "I6", "int6"},
    TypeRow{DType::kU2, 2, "U2", "uint2"},
};

consteval bool rows_follow_enum() {
  for (size_t i = 0; i < kTypes.size(); ++i) {
    if (static_cast<size_t>(kTypes[i].dtype) != i) return false;
  }
  return true;
}
static_assert(rows_follow_enum());

const TypeRow* row_of(DType dtype) noexcept {
  const auto index = static_cast<size_t>(dtype);
  return index < kTypes.size() ? &kTypes[index] : nullptr;
}

}  // namespace

int64_t bit_size(DType dtype) noexcept {
  const TypeRow* row = row_of(dtype);
  return row != nullptr ? row->bits : 0;
}

int64_t byte_size(DType dtype) {
  const int64_t bits = bit_size(dtype);
  if (bits >= 8) return bits / 8;
  throw Error(ErrorCode::kDType, {.what = "elements of this type are no whole bytes",
                                  .expected = "a type of at least 8 bits",
                                  .found = std::string(to_string(dtype))});
}

std::string_view to_string(DType dtype) noexcept {
  const TypeRow* row = row_of(dtype);
  return row != nullptr ? row->name : "unknown";
}

std::optional<DType> parse_dtype(std::string_view name) noexcept {
  for (const TypeRow& row : kTypes) {
    if (row.name == name || row.torch_name == name) return row.dtype;
  }
  return std::nullopt;
}

}  // namespace conclave::inline v0
