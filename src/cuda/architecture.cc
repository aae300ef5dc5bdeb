#include "cuda/architecture.h"

#include "cuda/device_info.h"

#include <algorithm>

namespace conclave::inline v0::cuda {
namespace {

bool runs_on(const Architecture& code, const Capability& device) {
  switch (code.kind) {
    case CodeKind::kExact:
      return code.capability == device;
    case CodeKind::kBinary:
      return code.capability.major == device.major && code.capability.minor <= device.minor;
    case CodeKind::kPtx:
      return code.capability <= device;
  }
  return false;
}

}  // namespace

std::string to_string(const Capability& capability) {
  return std::to_string(capability.major) + "." + std::to_string(capability.minor);
}

std::string to_string(const Architecture& architecture) {
  const char* const suffix = architecture.kind == CodeKind::kExact    ? "a"
                             : architecture.kind == CodeKind::kBinary ? "-real"
                                                                      : "-virtual";
  return std::to_string(architecture.capability.major) +
         std::to_string(architecture.capability.minor) + suffix;
}

const Architecture* code_for(const Capability& device, std::span<const Architecture> compiled) {
  const Architecture* best = nullptr;
  // Binaries come before PTX, later architectures before earlier ones.
  const auto comes_before = [](const Architecture& a, const Architecture& b) {
    const bool a_is_ptx = a.kind == CodeKind::kPtx;
    const bool b_is_ptx = b.kind == CodeKind::kPtx;
    return a_is_ptx != b_is_ptx ? b_is_ptx : a.capability > b.capability;
  };
  for (const Architecture& code : compiled) {
    if (runs_on(code, device) && (best == nullptr || comes_before(code, *best))) best = &code;
  }
  return best;
}

Support runs_plain_kernels(const DeviceInfo& device) {
  if (code_for(device.capability, device.plain_code) != nullptr) return Support::yes();
  std::string compiled;
  for (const Architecture& code : device.plain_code) {
    compiled += (compiled.empty() ? "" : ", ") + to_string(code);
  }
  return Support::no(device.name + " has compute capability " + to_string(device.capability) +
                     "; kernels are compiled for " + (compiled.empty() ? "none" : compiled) +
                     ": CONCLAVE_CUDA_ARCHITECTURES of the build adds others");
}

int32_t most_cluster_blocks(const DeviceInfo& device) {
  const Architecture* const code = code_for(device.capability, device.plain_code);
  const bool has_clusters = code != nullptr && code->capability >= kFirstWithClusters;
  return has_clusters ? device.cluster_blocks : 1;
}

}  // namespace conclave::inline v0::cuda
