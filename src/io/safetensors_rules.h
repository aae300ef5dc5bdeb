// The rules of the format that the reader and the writer share: limits, names, sizes.
#pragma once

#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0::io {

inline constexpr uint64_t kLengthBytes = 8;
// This limit is the format's own.
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;
// These limits are ours: far above any real file, low enough to bound memory and message length.
inline constexpr size_t kMaxTensors = 1'000'000;
inline constexpr size_t kMaxTensorNameBytes = 4096;
inline constexpr size_t kMaxTensorRank = 64;
inline constexpr size_t kMaxMetadataEntries = 65'536;
inline constexpr size_t kMaxMetadataBytes = size_t{16} << 20;

inline constexpr const char* kDamagedFileHint =
    "the file is damaged or its download was cut off; fetch it again";

// Bytes of the JSON text, from the length that starts the file. Throws Error(kSafetensorsTooShort,
// kSafetensorsHeaderTooLarge, kSafetensorsHeaderTruncated) before anything is allocated.
uint64_t safetensors_header_bytes(std::span<const std::byte> start, uint64_t file_bytes,
                                  std::string_view file);

// Whether files may have elements of this type: others of the library's are its own.
bool is_safetensors_type(DType dtype);

// Throws Error(kSafetensorsName, kSafetensorsUtf8) unless readers will accept the name.
void check_tensor_name(std::string_view name, std::string_view file);

// Bytes of a tensor, in checked arithmetic. Throws Error(kSafetensorsSizeOverflow,
// kSafetensorsSubByte).
uint64_t tensor_bytes(std::string_view name, DType dtype, std::span<const int64_t> shape,
                      std::string_view file);

// Returns "BF16 [8, 16]".
std::string describe_tensor(DType dtype, std::span<const int64_t> shape);

}  // namespace conclave::inline v0::io
