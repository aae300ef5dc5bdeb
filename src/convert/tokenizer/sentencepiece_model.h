// A tokenizer.model of SentencePiece, as far as it says how text becomes tokens.
#pragma once

#include "convert/tokenizer/token_table.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::conversion {

struct SentencePiece {
  std::string text;
  float score = 0;
  TokenKind kind = kNormal;
};

struct SentencePieceModel {
  std::vector<SentencePiece> pieces;  // by their ids
  // The pieces of these roles are called so.
  std::string unknown = "<unk>";
  std::string begin = "<s>";
  std::string end = "</s>";
  std::string padding = "<pad>";
  bool merges_by_score = false;  // byte-pair encoding; otherwise another algorithm
  bool falls_back_to_bytes = false;
  bool maps_characters = false;
  bool adds_prefix = true;  // a space before each text
  bool removes_extra_spaces = true;
  bool escapes_spaces = true;
  bool spaces_are_suffixes = false;
};

// Throws Error(kTokenizerModel) naming `file` for bytes that are no such model: damaged, without
// pieces, or with pieces that SentencePiece itself refuses.
SentencePieceModel parse_sentencepiece_model(std::string_view bytes, std::string_view file);

}  // namespace conclave::inline v0::conversion
