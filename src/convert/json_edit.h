// Edits one member of a JSON object as text, so that everything else keeps its bytes: numbers that
// a parser would round or refuse, such as Infinity, and the order and layout of members.
#pragma once

#include <string>
#include <string_view>

namespace conclave::inline v0::conversion {

// The text of a member's value; empty if there is none. `object` is valid JSON that begins with an
// object, as are those below.
std::string_view member_text(std::string_view object, std::string_view key);
// Returns the text without the member.
std::string without_member(std::string_view object, std::string_view key);
// Returns the text with the member last, in the place of one that it has.
std::string with_member(std::string_view object, std::string_view key, std::string_view value);

}  // namespace conclave::inline v0::conversion
