// Libraries that another build of the project could use, if found under a root folder.
#pragma once

#include "conclave/device.h"

#include <filesystem>
#include <vector>

namespace conclave::inline v0::cpu {

// The root "/" is this machine. Looks for files only: loading a driver's library would start it.
std::vector<BackendInfo> describe_backends(const std::filesystem::path& root);

}  // namespace conclave::inline v0::cpu
