#include "cpu/topology.h"

#include "cpu/backends.h"
#include "cpu/fake_root.h"
#include "cpu/memory.h"
#include "cpu/numa.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <sched.h>
#include <string>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace conclave::cpu {
namespace {

using test::FakeRoot;

TEST(ParseCpuList, RangesAndSingles_Expand) {
  EXPECT_EQ(parse_cpu_list("0-3,8,10-11"), (std::vector<int32_t>{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_EQ(parse_cpu_list("7"), std::vector<int32_t>{7});
  EXPECT_TRUE(parse_cpu_list("").empty());
}

TEST(ParseCpuList, Nonsense_IsLeftOut) {
  EXPECT_EQ(parse_cpu_list("a,1,-2,3-x,5"), (std::vector<int32_t>{1, 5}));
  EXPECT_TRUE(parse_cpu_list("9-3").empty());
  EXPECT_TRUE(parse_cpu_list("0-99999999999").empty());
}

TEST(ReadCaches, FourLevelsDescribed_TakesDataCaches) {
  const FakeRoot root;
  const std::string base = "sys/devices/system/cpu/cpu0/cache/index";
  const auto cache = [&](int index, const char* level, const char* type, const char* size) {
    root.write(base + std::to_string(index) + "/level", level);
    root.write(base + std::to_string(index) + "/type", type);
    root.write(base + std::to_string(index) + "/size", size);
  };
  cache(0, "1", "Data", "48K");
  cache(1, "1", "Instruction", "32K");
  cache(2, "2", "Unified", "2048K");
  cache(3, "3", "Unified", "260M");
  const CacheSizes sizes = read_caches(root.path());
  EXPECT_EQ(sizes.l1d_bytes, 48 * 1024);
  EXPECT_EQ(sizes.l2_bytes, 2048 * 1024);
  EXPECT_EQ(sizes.l3_bytes, 260 * 1024 * 1024);
}

TEST(ReadCaches, NothingThere_IsZero) {
  const FakeRoot root;
  EXPECT_EQ(read_caches(root.path()).l3_bytes, 0);
}

void write_node(const FakeRoot& root, int id, const char* cpus, int64_t kilobytes) {
  const std::string folder = "sys/devices/system/node/node" + std::to_string(id);
  const std::string prefix = "Node " + std::to_string(id);
  root.write(folder + "/cpulist", cpus);
  root.write(folder + "/meminfo", prefix + " MemTotal:       " + std::to_string(kilobytes) +
                                      " kB\n" + prefix + " MemFree:        1000 kB");
}

TEST(ReadNumaNodes, TwoSocketsAndAMemoryOnlyNode_AreListed) {
  const FakeRoot root;
  root.write("sys/devices/system/node/online", "0-1,4");
  write_node(root, 0, "0-3,8-11", 1000);
  write_node(root, 1, "4-7,12-15", 2000);
  write_node(root, 4, "", 500);
  const auto nodes = read_numa_nodes(root.path());
  ASSERT_EQ(nodes.size(), 3U);
  EXPECT_EQ(nodes[0].cpus, (std::vector<int32_t>{0, 1, 2, 3, 8, 9, 10, 11}));
  EXPECT_EQ(nodes[1].memory_bytes, 2000 * 1024);
  EXPECT_EQ(nodes[2].id, 4);
  EXPECT_TRUE(nodes[2].cpus.empty());
}

TEST(PlanInterleave, OneNode_LeavesTheDefault) {
  EXPECT_TRUE(plan_interleave({}).node_mask.empty());
  EXPECT_TRUE(plan_interleave({{.id = 0, .memory_bytes = 1, .cpus = {}}}).node_mask.empty());
}

TEST(PlanInterleave, NodesWithoutMemory_AreSkipped) {
  const auto plan = plan_interleave({{.id = 0, .memory_bytes = 1, .cpus = {0}},
                                     {.id = 1, .memory_bytes = 0, .cpus = {1}},
                                     {.id = 3, .memory_bytes = 1, .cpus = {}}});
  EXPECT_EQ(plan.node_mask, std::vector<uint64_t>{0b1001});
  EXPECT_EQ(plan.max_node, 4);
}

TEST(PlanInterleave, NodesBeyondOneWord_GrowTheMask) {
  const auto plan = plan_interleave(
      {{.id = 2, .memory_bytes = 1, .cpus = {}}, {.id = 64, .memory_bytes = 1, .cpus = {}}});
  EXPECT_EQ(plan.node_mask, (std::vector<uint64_t>{0b100, 1}));
  EXPECT_EQ(plan.max_node, 65);
}

TEST(ApplyInterleave, FirstNode_IsWhatTheKernelHolds) {
  constexpr size_t kBytes = size_t{4} << 20;
  const Buffer block(default_allocator(), kBytes);
  apply_interleave({.node_mask = {1}, .max_node = 1}, block.data(), kBytes);
  int policy = -1;
  uint64_t nodes = 0;
  constexpr int kFlagAddress = 2;
  if (syscall(SYS_get_mempolicy, &policy, &nodes, 64, block.data(), kFlagAddress) != 0) {
    GTEST_SKIP() << "memory policies are not available here";
  }
  constexpr int kInterleave = 3;
  EXPECT_EQ(policy, kInterleave);
  EXPECT_EQ(nodes, 1U);
}

TEST(ReadHugePageMode, EachMode_IsRecognised) {
  const FakeRoot root;
  const char* file = "sys/kernel/mm/transparent_hugepage/enabled";
  EXPECT_EQ(read_huge_page_mode(root.path()), "unknown");
  root.write(file, "always [madvise] never");
  EXPECT_EQ(read_huge_page_mode(root.path()), "madvise");
  root.write(file, "[always] madvise never");
  EXPECT_EQ(read_huge_page_mode(root.path()), "always");
  root.write(file, "no brackets");
  EXPECT_EQ(read_huge_page_mode(root.path()), "unknown");
}

TEST(ReadCpuQuota, VersionTwo_TakesTheLowestOnThePath) {
  const FakeRoot root;
  root.write("proc/self/cgroup", "0::/a.slice/b.service");
  EXPECT_FALSE(read_cpu_quota(root.path()));
  root.write("sys/fs/cgroup/a.slice/cpu.max", "150000 100000");
  root.write("sys/fs/cgroup/a.slice/b.service/cpu.max", "max 100000");
  EXPECT_EQ(read_cpu_quota(root.path()), 1.5);
  root.write("sys/fs/cgroup/a.slice/b.service/cpu.max", "50000 100000");
  EXPECT_EQ(read_cpu_quota(root.path()), 0.5);
}

TEST(ReadCpuQuota, VersionTwoInAContainer_FindsTheMountRoot) {
  const FakeRoot root;
  root.write("proc/self/cgroup", "0::/");
  root.write("sys/fs/cgroup/cpu.max", "400000 100000");
  EXPECT_EQ(read_cpu_quota(root.path()), 4.0);
}

TEST(ReadCpuQuota, VersionOneWithAHostPath_FallsBackToTheMountRoot) {
  const FakeRoot root;
  root.write("proc/self/cgroup", "4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc");
  root.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "250000");
  root.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000");
  EXPECT_EQ(read_cpu_quota(root.path()), 2.5);
}

TEST(ReadCpuQuota, VersionOneWithoutLimit_IsEmpty) {
  const FakeRoot root;
  root.write("proc/self/cgroup", "4:cpu:/");
  root.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1");
  root.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  EXPECT_FALSE(read_cpu_quota(root.path()));
}

TEST(ReadCpuQuota, MalformedFiles_AreNoLimit) {
  const FakeRoot root;
  root.write("proc/self/cgroup", "nonsense\n0::/");
  for (const char* text : {"", "x y", "100000", "100000 0", "0 100000", "-5 100000"}) {
    root.write("sys/fs/cgroup/cpu.max", text);
    EXPECT_FALSE(read_cpu_quota(root.path())) << text;
  }
}

TEST(UsableCpuCount, Quota_RoundsUpAndNeverBelowOne) {
  EXPECT_EQ(usable_cpu_count(8, std::nullopt), 8);
  EXPECT_EQ(usable_cpu_count(8, 1.5), 2);
  EXPECT_EQ(usable_cpu_count(8, 0.2), 1);
  EXPECT_EQ(usable_cpu_count(2, 16.0), 2);
  EXPECT_EQ(usable_cpu_count(0, std::nullopt), 1);
}

TEST(UsableCpuCount, AffinityOfThisThread_IsFollowed) {
  const std::vector<int32_t> all = affinity_cpus();
  ASSERT_FALSE(all.empty());
  std::vector<int32_t> narrowed;
  std::thread([&] {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    CPU_SET(static_cast<size_t>(all.back()), &mask);
    ASSERT_EQ(sched_setaffinity(0, sizeof(mask), &mask), 0);
    narrowed = affinity_cpus();
  }).join();
  EXPECT_EQ(narrowed, std::vector<int32_t>{all.back()});
}

TEST(ReadMemorySize, PlainMachine_IsMeminfo) {
  const FakeRoot root;
  root.write("proc/meminfo", "MemTotal:       2000 kB\nMemFree: 5 kB\nMemAvailable:   1500 kB");
  EXPECT_EQ(read_memory_size(root.path()).total_bytes, 2000 * 1024);
  EXPECT_EQ(read_memory_size(root.path()).available_bytes, 1500 * 1024);
}

TEST(ReadMemorySize, GroupLimit_LowersBoth) {
  const FakeRoot root;
  root.write("proc/meminfo", "MemTotal: 2000 kB\nMemAvailable: 1500 kB");
  root.write("proc/self/cgroup", "0::/");
  root.write("sys/fs/cgroup/memory.max", "1000000");
  root.write("sys/fs/cgroup/memory.current", "700000");
  root.write("sys/fs/cgroup/memory.stat", "anon 100000\ninactive_file 300000");
  const MemorySize size = read_memory_size(root.path());
  EXPECT_EQ(size.total_bytes, 1000000);
  EXPECT_EQ(size.available_bytes, 1000000 - 700000 + 300000);
}

TEST(ReadMemorySize, VersionOneWithoutLimit_IsMeminfo) {
  const FakeRoot root;
  root.write("proc/meminfo", "MemTotal: 2000 kB\nMemAvailable: 1500 kB");
  root.write("proc/self/cgroup", "9:memory:/x");
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  root.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "700000");
  EXPECT_EQ(read_memory_size(root.path()).total_bytes, 2000 * 1024);
  EXPECT_EQ(read_memory_size(root.path()).available_bytes, 1500 * 1024);
}

TEST(DescribeBackends, LibraryPresent_IsNamed) {
  const FakeRoot root;
  root.write("usr/lib64/libcuda.so.1", "");
  const auto backends = describe_backends(root.path());
  ASSERT_EQ(backends.size(), 3U);
  EXPECT_EQ(backends[0].name, "cuda");
  EXPECT_FALSE(backends[0].usable);
  EXPECT_TRUE(backends[0].reason.starts_with("this build has no CUDA support; this machine has "));
  EXPECT_TRUE(backends[0].reason.ends_with("usr/lib64/libcuda.so.1"));
  EXPECT_EQ(backends[2].reason,
            "this build has no NCCL support; libnccl.so.2 is not in the system's library folders");
}

}  // namespace
}  // namespace conclave::cpu
