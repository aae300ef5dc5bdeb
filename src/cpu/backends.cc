#include "cpu/backends.h"

#include <array>
#include <string>
#include <string_view>
#include <system_error>

namespace conclave::inline v0::cpu {
namespace {

struct Backend {
  std::string_view name;
  std::string_view title;
  std::array<std::string_view, 2> libraries;  // file names; the usual one comes first
};

constexpr std::array kBackends = {
    Backend{"cuda", "CUDA", {"libcuda.so.1", "libcuda.so"}},
    Backend{"mpi", "MPI", {"libmpi.so.40", "libmpi.so"}},
    Backend{"nccl", "NCCL", {"libnccl.so.2", "libnccl.so"}},
};

constexpr std::array<std::string_view, 7> kLibraryFolders = {
    "usr/lib/x86_64-linux-gnu", "usr/lib64",     "usr/lib",
    "lib/x86_64-linux-gnu",     "usr/local/lib", "usr/local/cuda/lib64",
    "opt/nvidia/lib64"};

std::string find_library(const std::filesystem::path& root, const Backend& backend) {
  for (const std::string_view folder : kLibraryFolders) {
    for (const std::string_view library : backend.libraries) {
      const std::filesystem::path path = root / folder / library;
      std::error_code error;
      if (std::filesystem::exists(path, error)) return path.string();
    }
  }
  return {};
}

std::string reason_of(const std::filesystem::path& root, const Backend& backend) {
  const std::string path = find_library(root, backend);
  const std::string build = "this build has no " + std::string(backend.title) + " support; ";
  if (!path.empty()) return build + "this machine has " + path;
  return build + std::string(backend.libraries[0]) + " is not in the system's library folders";
}

}  // namespace

std::vector<BackendInfo> describe_backends(const std::filesystem::path& root) {
  std::vector<BackendInfo> infos;
  infos.reserve(kBackends.size());
  for (const Backend& backend : kBackends) {
    infos.push_back(
        {.name = std::string(backend.name), .usable = false, .reason = reason_of(root, backend)});
  }
  return infos;
}

}  // namespace conclave::inline v0::cpu
