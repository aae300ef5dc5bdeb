#include "cpu/cgroup.h"

#include "cpu/text_file.h"

#include <optional>
#include <string>
#include <system_error>

namespace conclave::inline v0::cpu {
namespace {

struct Membership {
  std::string controllers;  // "cpu,cpuacct"; empty for v2
  std::string path;         // "/system.slice/x.service"
};

// A line is "id:controllers:path".
std::optional<Membership> parse_line(std::string_view line) {
  const size_t first = line.find(':');
  if (first == std::string_view::npos) return std::nullopt;
  const size_t second = line.find(':', first + 1);
  if (second == std::string_view::npos) return std::nullopt;
  return Membership{std::string(line.substr(first + 1, second - first - 1)),
                    std::string(line.substr(second + 1))};
}

bool lists(std::string_view controllers, std::string_view name) {
  while (!controllers.empty()) {
    const size_t comma = controllers.find(',');
    if (controllers.substr(0, comma) == name) return true;
    if (comma == std::string_view::npos) return false;
    controllers.remove_prefix(comma + 1);
  }
  return false;
}

void append_up_to(std::vector<CgroupFolder>& folders, const std::filesystem::path& mount,
                  std::string path, CgroupVersion version) {
  std::error_code error;
  while (true) {
    const std::filesystem::path folder = mount / std::filesystem::path(path).relative_path();
    if (std::filesystem::is_directory(folder, error)) folders.push_back({folder, version});
    if (path.empty() || path == std::string(1, '/')) return;
    path.erase(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
  }
}

}  // namespace

std::vector<CgroupFolder> cgroup_folders(const std::filesystem::path& root,
                                         std::string_view controller) {
  const std::filesystem::path base = root / "sys/fs/cgroup";
  const std::string text = read_text(root / "proc/self/cgroup");
  std::vector<CgroupFolder> folders;
  std::string_view rest = text;
  while (!rest.empty()) {
    const size_t end = rest.find('\n');
    const auto membership = parse_line(rest.substr(0, end));
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    if (!membership) continue;
    if (membership->controllers.empty()) {
      append_up_to(folders, base, membership->path, CgroupVersion::kV2);
    } else if (lists(membership->controllers, controller)) {
      // A joint mount has the joint name, with a link for each controller on most systems.
      std::error_code error;
      std::filesystem::path mount = base / membership->controllers;
      if (!std::filesystem::is_directory(mount, error)) mount = base / controller;
      append_up_to(folders, mount, membership->path, CgroupVersion::kV1);
    }
  }
  return folders;
}

}  // namespace conclave::inline v0::cpu
