#include "io/safetensors_rules.h"

#include "core/checked.h"
#include "io/text.h"

#include "conclave/error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

namespace conclave::inline v0::io {
namespace {

constexpr std::array kSafetensorsTypes = {
    DType::kBool,   DType::kU8,     DType::kI8,         DType::kU16,        DType::kI16,
    DType::kU32,    DType::kI32,    DType::kU64,        DType::kI64,        DType::kF16,
    DType::kBF16,   DType::kF32,    DType::kF64,        DType::kC64,        DType::kF8E4M3,
    DType::kF8E5M2, DType::kF8E8M0, DType::kF8E4M3Fnuz, DType::kF8E5M2Fnuz, DType::kF4,
    DType::kF6E2M3, DType::kF6E3M2};

}  // namespace

std::string describe_tensor(DType dtype, std::span<const int64_t> shape) {
  return fmt::format("{} [{}]", to_string(dtype), fmt::join(shape, ", "));
}

uint64_t safetensors_header_bytes(std::span<const std::byte> start, uint64_t file_bytes,
                                  std::string_view file) {
  if (file_bytes < kLengthBytes || start.size() < kLengthBytes) {
    throw Error(ErrorCode::kSafetensorsTooShort,
                {.what = "the file is too short for a safetensors header",
                 .file = std::string(file),
                 .expected = fmt::format("at least {} bytes", kLengthBytes),
                 .found = fmt::format("{} bytes", std::min<uint64_t>(file_bytes, start.size())),
                 .hint = kDamagedFileHint});
  }
  uint64_t bytes = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    bytes |= std::to_integer<uint64_t>(start[i]) << (8 * i);
  }
  if (bytes > kMaxHeaderBytes) {
    throw Error(ErrorCode::kSafetensorsHeaderTooLarge,
                {.what = "the header claims to be too large",
                 .file = std::string(file),
                 .found = fmt::format("{} bytes", bytes),
                 .limit = fmt::format("{} bytes", kMaxHeaderBytes),
                 .hint = "this is probably no safetensors file"});
  }
  if (bytes > file_bytes - kLengthBytes) {
    throw Error(ErrorCode::kSafetensorsHeaderTruncated,
                {.what = "the file ends within its header",
                 .file = std::string(file),
                 .expected = fmt::format("at least {} bytes", kLengthBytes + bytes),
                 .found = fmt::format("{} bytes", file_bytes),
                 .hint = kDamagedFileHint});
  }
  return bytes;
}

void check_tensor_name(std::string_view name, std::string_view file) {
  const auto refuse = [&](ErrorCode code, std::string what, std::string limit = {}) {
    throw Error(code, {.what = std::move(what),
                       .file = std::string(file),
                       .tensor = show_text(name),
                       .limit = std::move(limit)});
  };
  if (name.size() > kMaxTensorNameBytes) {
    refuse(ErrorCode::kSafetensorsName, "the tensor's name is too long",
           fmt::format("{} bytes", kMaxTensorNameBytes));
  }
  if (has_control_character(name)) {
    refuse(ErrorCode::kSafetensorsName, "the tensor's name contains a control character");
  }
  if (find_invalid_utf8(name)) {
    refuse(ErrorCode::kSafetensorsUtf8, "the tensor's name is not UTF-8");
  }
}

bool is_safetensors_type(DType dtype) {
  return std::ranges::find(kSafetensorsTypes, dtype) != kSafetensorsTypes.end();
}

uint64_t tensor_bytes(std::string_view name, DType dtype, std::span<const int64_t> shape,
                      std::string_view file) {
  // Zero dimensions do not hide an overflow of the others, in any order.
  std::optional<int64_t> bits = bit_size(dtype);
  bool is_empty = false;
  for (const int64_t dim : shape) {
    is_empty = is_empty || dim == 0;
    if (dim != 0 && bits) bits = checked_mul(*bits, dim);
  }
  if (!bits) {
    throw Error(ErrorCode::kSafetensorsSizeOverflow,
                {.what = "the tensor's size does not fit 64 bits",
                 .file = std::string(file),
                 .tensor = show_text(name),
                 .found = describe_tensor(dtype, shape)});
  }
  if (is_empty) return 0;
  if (*bits % 8 != 0) {
    throw Error(ErrorCode::kSafetensorsSubByte, {.what = "the tensor does not fill whole bytes",
                                                 .file = std::string(file),
                                                 .tensor = show_text(name),
                                                 .found = describe_tensor(dtype, shape)});
  }
  return static_cast<uint64_t>(*bits / 8);
}

}  // namespace conclave::inline v0::io
