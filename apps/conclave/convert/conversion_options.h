// Options by which convert and synth say what a conversion does, and the tool's words for the
// library's errors about it.
#pragma once

#include "conclave/convert.h"
#include "conclave/error.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::tool {

// The values of --container.
std::vector<std::string> container_names();
// None for "".
std::optional<ModelContainer> parse_container(std::string_view name);
// Parses "PATTERN=FORMAT". Throws Error(kInvalidArgument).
KeepRule parse_keep_rule(const std::string& text);
// The names of conversion_formats(), each once.
std::vector<std::string> conversion_format_names();

// Names the options by which the tool calls fields and enumerators of a ConversionRequest;
// `format_option` is that of the form.
Error in_words_of_options(const Error& error, std::string_view format_option);

}  // namespace conclave::tool
