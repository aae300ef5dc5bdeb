// Folders of testdata, in memory, for tests that change them.
#pragma once

#include "checkpoint/tiny_model.h"

#include <filesystem>
#include <string>

namespace conclave::testing {

// A folder with config.json and model.safetensors.
TinyModel read_folder(const std::filesystem::path& folder);
// The one of this name in testdata/quantised.
TinyModel golden_folder(const std::string& name);

}  // namespace conclave::testing
