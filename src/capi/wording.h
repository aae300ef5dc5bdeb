// Messages of the library in the words of the C interface.
#pragma once

#include <string>
#include <string_view>

namespace conclave::inline v0::capi {

// Returns the text with enumerators as C has them: "IdPolicy::kSkip" is CONCLAVE_ID_POLICY_SKIP,
// and "SharedMode::kAdd", which the JSON of a spec says by a word, is "add".
std::string in_c_words(std::string_view text);

}  // namespace conclave::inline v0::capi
