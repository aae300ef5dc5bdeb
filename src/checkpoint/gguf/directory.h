// A directory with a GGUF model in place of a Hugging Face one.
#pragma once

#include <filesystem>

namespace conclave::inline v0::checkpoint {

// The GGUF model of a directory without config.json: its one file, or the first of its parts;
// `path` itself if it is anything else. Projectors of other inputs ("mmproj...") do not count.
// Throws Error(kFileNotFound) naming the models if there are several.
std::filesystem::path model_path(const std::filesystem::path& path);

}  // namespace conclave::inline v0::checkpoint
