#include "cpu/topology.h"

#include "cpu/cgroup.h"
#include "cpu/text_file.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sched.h>

namespace conclave::inline v0::cpu {
namespace {

constexpr int64_t kKibibyte = 1024;

// Parses "48K", "32768K", "1M" or "512".
int64_t parse_cache_size(std::string_view text) {
  std::string_view unit;
  const auto number = parse_integer(text, &unit);
  if (!number || *number < 0 || *number > std::numeric_limits<int32_t>::max()) return 0;
  if (unit.starts_with('K')) return *number * kKibibyte;
  if (unit.starts_with('M')) return *number * kKibibyte * kKibibyte;
  return *number;
}

// Parses "150000 100000" in v2, the two files in v1. Without a positive quota there is no limit.
std::optional<double> quota_of(const CgroupFolder& folder) {
  std::optional<int64_t> quota;
  std::optional<int64_t> period;
  if (folder.version == CgroupVersion::kV2) {
    const std::string text = read_text(folder.path / "cpu.max");
    std::string_view rest;
    quota = parse_integer(text, &rest);
    if (quota) period = parse_integer(rest);
  } else {
    quota = parse_integer(read_text(folder.path / "cpu.cfs_quota_us"));
    period = parse_integer(read_text(folder.path / "cpu.cfs_period_us"));
  }
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

struct GroupMemory {
  int64_t limit_bytes;
  int64_t used_bytes;
};

std::optional<GroupMemory> memory_of(const CgroupFolder& folder) {
  const bool v2 = folder.version == CgroupVersion::kV2;
  const auto limit =
      parse_integer(read_text(folder.path / (v2 ? "memory.max" : "memory.limit_in_bytes")));
  if (!limit || *limit <= 0) return std::nullopt;
  const auto used =
      parse_integer(read_text(folder.path / (v2 ? "memory.current" : "memory.usage_in_bytes")));
  // Unused page cache counts as used, but the kernel gives it back on demand.
  const auto cache = find_value(read_text(folder.path / "memory.stat"),
                                v2 ? "inactive_file" : "total_inactive_file");
  return GroupMemory{*limit, std::max<int64_t>(0, used.value_or(0) - cache.value_or(0))};
}

}  // namespace

std::vector<int32_t> parse_cpu_list(std::string_view text) {
  constexpr int64_t kMaxCpus = 1 << 16;
  std::vector<int32_t> cpus;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const std::string_view part = text.substr(0, comma);
    text.remove_prefix(comma == std::string_view::npos ? text.size() : comma + 1);
    std::string_view rest;
    const auto first = parse_integer(part, &rest);
    if (!first || *first < 0 || *first >= kMaxCpus) continue;
    std::optional<int64_t> last = first;
    if (rest.starts_with('-')) last = parse_integer(rest.substr(1));
    if (!last || *last >= kMaxCpus) continue;
    for (int64_t cpu = *first; cpu <= *last; ++cpu) cpus.push_back(static_cast<int32_t>(cpu));
  }
  return cpus;
}

CacheSizes read_caches(const std::filesystem::path& root) {
  CacheSizes sizes;
  const std::filesystem::path base = root / "sys/devices/system/cpu/cpu0/cache";
  for (int index = 0; index < 16; ++index) {
    const std::filesystem::path folder = base / ("index" + std::to_string(index));
    const auto level = parse_integer(read_text(folder / "level"));
    if (!level) break;
    const int64_t bytes = parse_cache_size(read_text(folder / "size"));
    const bool holds_instructions = read_text(folder / "type").starts_with('I');
    if (*level == 1 && !holds_instructions) sizes.l1d_bytes = bytes;
    if (*level == 2) sizes.l2_bytes = bytes;
    if (*level == 3) sizes.l3_bytes = bytes;
  }
  return sizes;
}

std::vector<NumaNode> read_numa_nodes(const std::filesystem::path& root) {
  const std::filesystem::path base = root / "sys/devices/system/node";
  std::vector<NumaNode> nodes;
  for (const int32_t id : parse_cpu_list(read_text(base / "online"))) {
    const std::string name = "node" + std::to_string(id);
    const std::string total = "Node " + std::to_string(id) + " MemTotal";
    NumaNode node{.id = id, .cpus = parse_cpu_list(read_text(base / name / "cpulist"))};
    node.memory_bytes =
        find_value(read_text(base / name / "meminfo"), total).value_or(0) * kKibibyte;
    nodes.push_back(std::move(node));
  }
  return nodes;
}

std::string read_huge_page_mode(const std::filesystem::path& root) {
  // The file reads "always [madvise] never": the active mode is in brackets.
  const std::string text = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled");
  const size_t open = text.find('[');
  const size_t close = text.find(']', open == std::string::npos ? 0 : open);
  if (open == std::string::npos || close == std::string::npos) return "unknown";
  return text.substr(open + 1, close - open - 1);
}

MemorySize read_memory_size(const std::filesystem::path& root) {
  const std::string text = read_text(root / "proc/meminfo");
  MemorySize size{.total_bytes = find_value(text, "MemTotal").value_or(0) * kKibibyte,
                  .available_bytes = find_value(text, "MemAvailable").value_or(0) * kKibibyte};
  for (const CgroupFolder& folder : cgroup_folders(root, "memory")) {
    const auto group = memory_of(folder);
    if (!group) continue;
    size.total_bytes = std::min(size.total_bytes, group->limit_bytes);
    const int64_t left = std::max<int64_t>(0, group->limit_bytes - group->used_bytes);
    size.available_bytes = std::min(size.available_bytes, left);
  }
  return size;
}

std::optional<double> read_cpu_quota(const std::filesystem::path& root) {
  std::optional<double> lowest;
  for (const CgroupFolder& folder : cgroup_folders(root, "cpu")) {
    const auto quota = quota_of(folder);
    if (quota && (!lowest || *quota < *lowest)) lowest = quota;
  }
  return lowest;
}

std::vector<int32_t> affinity_cpus() {
  // The kernel's mask may be longer than cpu_set_t, so the buffer grows until it fits.
  for (size_t count = CPU_SETSIZE; count <= (size_t{1} << 16); count *= 2) {
    std::vector<cpu_set_t> mask(count / CPU_SETSIZE);
    const size_t bytes = CPU_ALLOC_SIZE(count);
    if (sched_getaffinity(0, bytes, mask.data()) != 0) continue;
    std::vector<int32_t> cpus;
    for (size_t cpu = 0; cpu < count; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, mask.data())) cpus.push_back(static_cast<int32_t>(cpu));
    }
    return cpus;
  }
  return {0};
}

int32_t usable_cpu_count(int32_t affinity_count, std::optional<double> quota) {
  int32_t count = std::max(affinity_count, 1);
  if (quota && *quota < count) count = std::max(1, static_cast<int32_t>(std::ceil(*quota)));
  return count;
}

int32_t usable_cpu_count() {
  return usable_cpu_count(static_cast<int32_t>(affinity_cpus().size()), read_cpu_quota("/"));
}

}  // namespace conclave::inline v0::cpu
