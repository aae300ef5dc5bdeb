// How this program was started, to start it once more.
#pragma once

#include <string>
#include <vector>

namespace conclave::tool {

// The words with which this process was started; the first is the path of its program, which may be
// an interpreter. Throws Error(kUnsupported) where that cannot be found out.
std::vector<std::string> own_command();

// For execv: valid as long as `words` are.
std::vector<char*> argument_pointers(std::vector<std::string>& words);

}  // namespace conclave::tool
