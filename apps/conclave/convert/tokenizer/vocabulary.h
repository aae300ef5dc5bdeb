// Kinds of vocabularies, a file each, as rows of one table.
#pragma once

#include "convert/tokenizer/tokenizer_files.h"

#include "conclave/gguf.h"

#include <cstdint>
#include <vector>

namespace conclave::tool {

struct VocabularyKind {
  bool (*reads)(const TokenizerFiles& files);
  // The keys of a vocabulary for an embedding of so many rows, without those that kinds share.
  // Throws UnwrittenVocabulary with the reason if llama.cpp would make other tokens of it.
  std::vector<GgufKey> (*keys)(const TokenizerFiles& files, int64_t rows);
};

extern const VocabularyKind kByteLevelVocabulary;

}  // namespace conclave::tool
