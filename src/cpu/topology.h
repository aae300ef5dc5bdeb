// Caches, NUMA nodes, quotas and memory of this machine, as the kernel reports them in files under
// a root folder, so that a test can describe any machine.
#pragma once

#include "conclave/device.h"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::cpu {

// Parses "0-3,8,10-11", the list format of sysfs. Entries that do not parse are left out.
std::vector<int32_t> parse_cpu_list(std::string_view text);

struct CacheSizes {
  int64_t l1d_bytes = 0;
  int64_t l2_bytes = 0;
  int64_t l3_bytes = 0;
};

struct MemorySize {
  int64_t total_bytes = 0;      // the machine's, or the control group's limit if that is lower
  int64_t available_bytes = 0;  // without swapping; page cache counts as available
};

// All take the root that holds sys/ and proc/; "/" is this machine. A file that is missing or does
// not parse yields 0, an empty list or "unknown", never an error.
CacheSizes read_caches(const std::filesystem::path& root);
std::vector<NumaNode> read_numa_nodes(const std::filesystem::path& root);
std::string read_huge_page_mode(const std::filesystem::path& root);
MemorySize read_memory_size(const std::filesystem::path& root);
// Number of CPUs' worth of time that the control group may use: the lowest quota on the path to the
// root, cgroup v1 or v2. Empty means that there is no limit.
std::optional<double> read_cpu_quota(const std::filesystem::path& root);

// The CPUs in this thread's affinity mask, ascending.
std::vector<int32_t> affinity_cpus();
// Pure: rounds up, as a quota of 1.5 CPUs keeps two threads busy part of the time; at least 1.
int32_t usable_cpu_count(int32_t affinity_count, std::optional<double> quota);
// The number for this process, at this moment.
int32_t usable_cpu_count();

}  // namespace conclave::inline v0::cpu
