// Tokens by their ids, as GGUF files list them.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::tool {

// llama.cpp's kinds of tokens, by its numbers.
enum TokenKind : int32_t { kNormal = 1, kControl = 3, kUserDefined = 4, kUnused = 5 };

// Why a vocabulary does not become keys.
class UnwrittenVocabulary : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class TokenTable {
 public:
  // A token for each row of the embedding; those that nothing names are "[PAD7]".
  explicit TokenTable(int64_t rows);

  // Throws UnwrittenVocabulary for a token without a row.
  void put(int64_t id, std::string text, TokenKind kind);

  const std::vector<std::string>& texts() const { return texts_; }
  const std::vector<int32_t>& kinds() const { return kinds_; }

 private:
  std::vector<std::string> texts_;
  std::vector<int32_t> kinds_;
};

// What is written like a mark is one, though files may not call it special.
bool looks_special(std::string_view text);

}  // namespace conclave::tool
