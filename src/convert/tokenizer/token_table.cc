#include "convert/tokenizer/token_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

namespace conclave::inline v0::conversion {
namespace {

// Scores of llama.cpp's converter for tokens that no merge makes.
constexpr float kUnusedScore = -10000;
constexpr float kAddedScore = -1000;

// A token that is written like a mark is one, though files may not call it special.
bool looks_special(std::string_view text) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kMarks = {
      {{"<|", "|>"}, {"<｜", "｜>"}, {"<unused", ">"}}};
  if (text == "<pad>" || text == "<mask>") return true;
  return std::ranges::any_of(kMarks, [&](const auto& mark) {
    return text.starts_with(mark.first) && text.ends_with(mark.second);
  });
}

}  // namespace

TokenTable::TokenTable(int64_t rows)
    : texts_(static_cast<size_t>(rows)),
      kinds_(static_cast<size_t>(rows), kUnused),
      scores_(static_cast<size_t>(rows), kUnusedScore) {
  for (size_t id = 0; id < texts_.size(); ++id) texts_[id] = fmt::format("[PAD{}]", id);
}

void TokenTable::put(int64_t id, std::string text, TokenKind kind, float score) {
  if (id < 0 || id >= static_cast<int64_t>(texts_.size())) {
    throw UnwrittenVocabulary(fmt::format("token {} has no row in the embedding", id));
  }
  const auto at = static_cast<size_t>(id);
  texts_[at] = std::move(text);
  kinds_[at] = kind;
  scores_[at] = score;
}

void TokenTable::add(int64_t id, AddedToken token) {
  const bool is_mark = token.is_special || looks_special(token.text);
  put(id, std::move(token.text), is_mark ? kControl : kUserDefined, kAddedScore);
}

std::optional<int64_t> TokenTable::find(std::string_view text) const {
  const auto at = std::ranges::find(texts_, text);
  if (at == texts_.end()) return std::nullopt;
  return at - texts_.begin();
}

}  // namespace conclave::inline v0::conversion
