// Everything that vocabularies of pieces have alike, wherever their pieces come from.
#pragma once

#include "convert/tokenizer/token_table.h"
#include "convert/tokenizer/tokenizer_files.h"
#include "convert/tokenizer/vocabulary.h"

#include <cstdint>
#include <string>
#include <string_view>

namespace conclave::inline v0::conversion {

// A space as pieces have it.
inline constexpr std::string_view kPieceSpace = "▁";

// The start of a text, as pieces have it.
enum class TextPrefix : uint8_t { kNone, kSpace };

// The text of a token that is never split: llama.cpp looks for it before spaces are as in pieces.
std::string with_spaces(std::string text);

// Whether a token is one of the 256 that stand for bytes: "<0x0A>".
bool is_byte_token(std::string_view text);

// Puts the tokens of the other files into the table, the later of two for one id as llama.cpp's
// converter does, and makes the vocabulary of it. Throws UnwrittenVocabulary unless each byte has a
// token, since llama.cpp has nothing else for characters without one.
Vocabulary vocabulary_of_pieces(const TokenizerFiles& files, TokenTable table, TextPrefix prefix);

}  // namespace conclave::inline v0::conversion
