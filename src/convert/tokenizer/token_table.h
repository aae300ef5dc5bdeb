// Tokens by their ids, as GGUF files list them.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::conversion {

// Kinds of tokens by the numbers that llama.cpp and SentencePiece have for them.
enum TokenKind : int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6
};

// Why a vocabulary does not become keys.
class UnwrittenVocabulary : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A token that comes beside the vocabulary.
struct AddedToken {
  std::string text;
  bool is_special = false;  // a mark; others are words that are never split
};

class TokenTable {
 public:
  // A token for each row of the embedding; those that nothing names are "[PAD7]".
  explicit TokenTable(int64_t rows);

  // Throws UnwrittenVocabulary for a token without a row.
  void put(int64_t id, std::string text, TokenKind kind, float score = 0);
  void add(int64_t id, AddedToken token);

  // The first of this text.
  std::optional<int64_t> find(std::string_view text) const;

  const std::vector<std::string>& texts() const { return texts_; }
  const std::vector<int32_t>& kinds() const { return kinds_; }
  const std::vector<float>& scores() const { return scores_; }

 private:
  std::vector<std::string> texts_;
  std::vector<int32_t> kinds_;
  std::vector<float> scores_;
};

}  // namespace conclave::inline v0::conversion
