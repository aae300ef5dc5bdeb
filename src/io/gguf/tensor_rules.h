// Says what a tensor of a GGUF model must be, whether a header lists it or a program has it.
#pragma once

#include "io/gguf/header.h"
#include "io/gguf/types.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace conclave::inline v0::io {

// The format's limit.
inline constexpr size_t kMaxGgufNameBytes = 64;

// Errors name the tensor and, unless it is empty, the file.

// Throws Error(kGgufName) unless readers will accept the name.
void check_gguf_name(std::string_view name, std::string_view file);
// The type of this number. Throws Error(kGgufTensorType).
const GgufType& require_gguf_type(uint32_t id, std::string_view tensor, std::string_view file);
// The bytes of the tensor by its type and shape. Throws Error(kGgufShape) if a row does not hold
// whole blocks, and Error(kGgufSizeOverflow).
uint64_t gguf_tensor_bytes(const GgufTensor& tensor, std::string_view file);

}  // namespace conclave::inline v0::io
