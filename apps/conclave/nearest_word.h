// Finds the word that a mistyped one was meant to be.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace conclave::tool {

// The candidate with the fewest insertions, deletions, replacements and swaps of neighbours; empty
// if every candidate differs in half of the letters or more.
std::string nearest_word(std::string_view word, std::span<const std::string> candidates);

}  // namespace conclave::tool
