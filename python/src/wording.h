// Translates the library's messages into the words of Python's interface.
#pragma once

#include "binding.h"

#include <string>
#include <string_view>

namespace conclave::python {

// Returns the text with every name of the C++ interface in its Python spelling: "IdPolicy::kSkip
// drops such ids" becomes "id_policy="skip" drops such ids".
std::string in_python_words(std::string_view text);

// Adds `_conclave.python_words`: {spelling in C++: spelling in Python}.
void bind_wording(nb::module_& module);

}  // namespace conclave::python
