// The headers of a GGUF model's parts, given as bytes.
#pragma once

#include "checkpoint/gguf/tensor_table.h"
#include "io/gguf/header.h"

#include <cstddef>
#include <span>
#include <vector>

namespace conclave::inline v0::checkpoint {

inline constexpr const char* kGgufHeaderName = "GGUF header";  // for messages

struct FedHeader {
  io::GgufHeader first;                // has the model's keys
  std::vector<io::GgufTensor> listed;  // all parts list these
  GgufTensorList list = GgufTensorList::kSoFar;
};

// Errors name other parts "GGUF header 2" and so on, as they are given. Throws Error(35x to 36x),
// and Error(kGgufSplit) for more or other parts than the first has by its keys.
FedHeader read_fed_header(std::span<const std::byte> first,
                          std::span<const std::span<const std::byte>> other_parts);

}  // namespace conclave::inline v0::checkpoint
