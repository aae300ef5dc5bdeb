// The control group of this process: the folders that hold its limits.
#pragma once

#include <filesystem>
#include <string_view>
#include <vector>

namespace conclave::inline v0::cpu {

enum class CgroupVersion : unsigned char { kV1, kV2 };

struct CgroupFolder {
  std::filesystem::path path;
  CgroupVersion version = CgroupVersion::kV2;
};

// The folders of `controller` ("cpu", "memory") from this process' group up to the root, innermost
// first. A container may show paths of its host: folders that do not exist are left out.
std::vector<CgroupFolder> cgroup_folders(const std::filesystem::path& root,
                                         std::string_view controller);

}  // namespace conclave::inline v0::cpu
