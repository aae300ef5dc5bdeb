// The vocabulary of a directory as keys of a GGUF file.
#pragma once

#include "conclave/error.h"
#include "conclave/gguf.h"

#include <cstdint>
#include <filesystem>
#include <vector>

namespace conclave::tool {

// Reads tokenizer.json and tokenizer_config.json. Byte-level BPE whose text is split by a rule that
// llama.cpp has a name for becomes keys; `vocabulary` counts the embedding's rows. No, with the
// reason, for all else: then there are no keys.
Support tokenizer_keys(const std::filesystem::path& directory, int64_t vocabulary,
                       std::vector<GgufKey>& keys);

}  // namespace conclave::tool
