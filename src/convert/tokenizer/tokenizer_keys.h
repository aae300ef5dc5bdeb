// The vocabulary of a directory as keys of a GGUF file.
#pragma once

#include "conclave/error.h"
#include "conclave/gguf.h"

#include <cstdint>
#include <filesystem>
#include <vector>

namespace conclave::inline v0::conversion {

// Reads the tokenizer of a directory for an embedding of so many rows, and adds its keys to those
// that config.json gave, or replaces them. No, with the reason, if llama.cpp would make other
// tokens of a text: then there are no keys. Throws Error(kTokenizerModel) for a damaged
// tokenizer.model.
Support tokenizer_keys(const std::filesystem::path& directory, int64_t rows,
                       std::vector<GgufKey>& keys);

}  // namespace conclave::inline v0::conversion
