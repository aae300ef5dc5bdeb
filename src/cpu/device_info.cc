#include "cpu/cpuid.h"
#include "cpu/isa.h"
#include "cpu/topology.h"

#include "conclave/device.h"

#include <string>
#include <vector>

namespace conclave::inline v0 {
namespace {

std::vector<std::string> present_features() {
  std::vector<std::string> names;
  for (const cpu::Feature& feature : cpu::features()) {
    if (cpu::has(cpu::cpuid_words(), feature)) names.emplace_back(feature.name);
  }
  return names;
}

std::vector<IsaInfo> isa_infos() {
  using cpu::Isa;
  std::vector<IsaInfo> infos;
  for (const Isa isa :
       {Isa::kAmx, Isa::kAvx512Bf16, Isa::kAvx512Vnni, Isa::kAvx512, Isa::kAvx2, Isa::kScalar}) {
    const Support support = cpu::usable(isa);
    infos.push_back({.name = std::string(cpu::to_string(isa)),
                     .usable = static_cast<bool>(support),
                     .reason = support.reason()});
  }
  return infos;
}

}  // namespace

CpuInfo cpu_info() {
  const cpu::CpuIdentity& identity = cpu::cpu_identity();
  const cpu::CacheSizes caches = cpu::read_caches("/");
  const cpu::ArithmeticChoice choice = cpu::choose_arithmetic(cpu::cpu_id(), cpu::best_isa());
  CpuInfo info;
  info.vendor = identity.vendor;
  info.brand = identity.brand;
  info.family = identity.family;
  info.model = identity.model;
  info.stepping = identity.stepping;
  info.features = present_features();
  info.usable_cpus = cpu::usable_cpu_count();
  info.l1d_bytes = caches.l1d_bytes;
  info.l2_bytes = caches.l2_bytes;
  info.l3_bytes = caches.l3_bytes;
  info.memory_bytes = cpu::read_memory_size("/").total_bytes;
  info.huge_pages = cpu::read_huge_page_mode("/");
  info.isas = isa_infos();
  info.numa = cpu::read_numa_nodes("/");
  info.arithmetic = std::string(cpu::to_string(choice.arithmetic));
  info.arithmetic_reason = std::string(choice.reason);
  return info;
}

}  // namespace conclave::inline v0
