// Tokens with a role: which they are, and whether texts begin or end with them.
#pragma once

#include "convert/tokenizer/tokenizer_files.h"
#include "convert/tokenizer/vocabulary.h"

#include "conclave/gguf.h"

#include <span>
#include <vector>

namespace conclave::inline v0::conversion {

// The ids of tokens that tokenizer_config.json gives a role, and those of the vocabulary itself for
// roles that neither it nor one of `known` states.
std::vector<GgufKey> role_keys(const TokenizerFiles& files, const Vocabulary& vocabulary,
                               std::span<const GgufKey> known);
// Whether texts begin and end with tokens that say so: stated, or by what is done with each text.
std::vector<GgufKey> flag_keys(const TokenizerFiles& files, const Vocabulary& vocabulary);

}  // namespace conclave::inline v0::conversion
