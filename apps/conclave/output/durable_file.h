// Text files that are on the disk before the tool says so.
#pragma once

#include <filesystem>
#include <string_view>

namespace conclave::tool {

// The text is on the disk when it returns. Throws Error(kFileWrite).
void write_durably(const std::filesystem::path& path, std::string_view text);

}  // namespace conclave::tool
