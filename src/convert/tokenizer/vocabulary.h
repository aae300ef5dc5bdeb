// Kinds of vocabularies, a file each, as rows of one table.
#pragma once

#include "convert/tokenizer/token_table.h"
#include "convert/tokenizer/tokenizer_files.h"

#include "conclave/gguf.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::conversion {

// The text of a token with a role, such as "bos".
struct RoleToken {
  std::string_view role;
  std::string text;
};

struct Vocabulary {
  std::string_view model;  // what llama.cpp calls the algorithm
  TokenTable table;
  std::vector<GgufKey> keys;        // beside the tokens and their kinds
  std::vector<RoleToken> roles;     // what the vocabulary says where the model's files do not
  bool begins_unless_told = false;  // texts begin with "bos" where no file says whether
};

struct VocabularyKind {
  bool (*is_kind_of)(const TokenizerFiles& files);
  // A vocabulary for an embedding of so many rows. Throws UnwrittenVocabulary with the reason if
  // llama.cpp would make other tokens of it.
  Vocabulary (*read)(const TokenizerFiles& files, int64_t rows);
};

extern const VocabularyKind kByteLevelVocabulary;
extern const VocabularyKind kSentencePieceVocabulary;
extern const VocabularyKind kMergedPiecesVocabulary;

}  // namespace conclave::inline v0::conversion
