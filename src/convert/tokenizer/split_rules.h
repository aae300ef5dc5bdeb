// The rules by which text is split before byte-level merges, as tokenizer.json and llama.cpp call
// them.
#pragma once

#include <nlohmann/json.hpp>

#include <string_view>

namespace conclave::inline v0::conversion {

// The name that llama.cpp has for what tokenizer.json does before its merges. Throws
// UnwrittenVocabulary if it has none, or if the merges undo what its rule does less.
std::string_view split_name(const nlohmann::json& tokenizer);

}  // namespace conclave::inline v0::conversion
