#include "convert/tokenizer/token_table.h"

#include <fmt/format.h>

#include <utility>

namespace conclave::tool {

TokenTable::TokenTable(int64_t rows)
    : texts_(static_cast<size_t>(rows)), kinds_(static_cast<size_t>(rows), kUnused) {
  for (size_t id = 0; id < texts_.size(); ++id) texts_[id] = fmt::format("[PAD{}]", id);
}

void TokenTable::put(int64_t id, std::string text, TokenKind kind) {
  if (id < 0 || id >= static_cast<int64_t>(texts_.size())) {
    throw UnwrittenVocabulary(fmt::format("token {} has no row in the embedding", id));
  }
  texts_[static_cast<size_t>(id)] = std::move(text);
  kinds_[static_cast<size_t>(id)] = kind;
}

bool looks_special(std::string_view text) { return text.starts_with("<|") && text.ends_with("|>"); }

}  // namespace conclave::tool
