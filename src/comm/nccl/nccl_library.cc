#include "comm/nccl/nccl_library.h"

#include <fmt/format.h>

#include <cstring>
#include <dlfcn.h>

namespace conclave::inline v0::comm {
namespace {

constexpr const char* kName = "libnccl.so.2";
// The first with ncclCommSplit, which copies an application's own communicator.
constexpr int kOldestVersion = 21800;
// The first with windows whose peers' addresses the device knows, and the first whose host does.
constexpr int kOldestWindows = 22800;
constexpr int kWindowsByCall = 22900;

template <class Function>
bool look_up(void* handle, const char* name, Function& function, std::string& missing) {
  void* const found = dlsym(handle, name);
  if (found == nullptr) {
    missing = name;
    return false;
  }
  static_assert(sizeof(function) == sizeof(found));
  std::memcpy(&function, &found, sizeof(found));
  return true;
}

bool look_up_all(void* handle, NcclLibrary& to, std::string& missing) {
  const auto find = [&](const char* name, auto& function) {
    return look_up(handle, name, function, missing);
  };
  return find("ncclGetVersion", to.get_version) &&
         find("ncclGetErrorString", to.get_error_string) &&
         find("ncclGetUniqueId", to.get_unique_id) &&
         find("ncclCommInitRankConfig", to.comm_init_rank_config) &&
         find("ncclCommSplit", to.comm_split) && find("ncclCommAbort", to.comm_abort) &&
         find("ncclCommGetAsyncError", to.comm_get_async_error) &&
         find("ncclCommCount", to.comm_count) && find("ncclCommUserRank", to.comm_user_rank) &&
         find("ncclCommCuDevice", to.comm_cu_device) && find("ncclGroupStart", to.group_start) &&
         find("ncclGroupEnd", to.group_end) && find("ncclSend", to.send) &&
         find("ncclRecv", to.recv);
}

// Not all libraries have them.
void look_up_windows(void* handle, NcclWindowCalls& to) {
  std::string missing;
  look_up(handle, "ncclMemAlloc", to.mem_alloc, missing);
  look_up(handle, "ncclMemFree", to.mem_free, missing);
  look_up(handle, "ncclCommWindowRegister", to.window_register, missing);
  look_up(handle, "ncclCommWindowDeregister", to.window_deregister, missing);
  look_up(handle, "ncclTeamLsa", to.team_lsa, missing);
  look_up(handle, "ncclGetPeerDevicePointer", to.get_peer_device_pointer, missing);
}

NcclSearch ask(void* handle, const std::string& path) {
  NcclSearch found;
  found.library.path = path;
  Dl_info info{};
  void* const any = dlsym(handle, "ncclGetVersion");
  if (any != nullptr && dladdr(any, &info) != 0) found.library.path = info.dli_fname;
  // Older ones lack functions, so that the version is asked first.
  std::string missing;
  if (!look_up(handle, "ncclGetVersion", found.library.get_version, missing)) {
    found.support = Support::no(fmt::format("{} has no {}", found.library.path, missing));
    return found;
  }
  const NcclResult result = found.library.get_version(&found.library.version);
  if (result != kNcclSuccess) {
    found.support = Support::no(
        fmt::format("{} does not tell its version: error {}", found.library.path, result));
  } else if (found.library.version < kOldestVersion) {
    found.support = Support::no(
        fmt::format("{} is NCCL {}; {} or newer is needed", found.library.path,
                    nccl_version_text(found.library.version), nccl_version_text(kOldestVersion)));
  } else if (!look_up_all(handle, found.library, missing)) {
    found.support = Support::no(fmt::format("{} has no {}", found.library.path, missing));
  } else {
    look_up_windows(handle, found.library.windows);
    found.support = Support::yes();
  }
  return found;
}

// site-packages has this library in conclave/ and NCCL in nvidia/nccl/lib/.
std::string path_beside_this_library() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&path_beside_this_library), &info) == 0) return {};
  const std::string own = info.dli_fname == nullptr ? "" : info.dli_fname;
  const size_t folder = own.rfind('/');
  if (folder == std::string::npos) return {};
  return own.substr(0, folder) + "/../nvidia/nccl/lib/" + kName;
}

}  // namespace

NcclSearch find_nccl_among(const std::vector<std::string>& paths) {
  NcclSearch best;
  std::string reasons;
  for (const std::string& path : paths) {
    void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* const why = dlerror();
      if (reasons.empty()) reasons = why != nullptr ? why : path + " cannot be loaded";
      continue;
    }
    NcclSearch found = ask(handle, path);
    if (found.support) return found;
    if (best.library.version == 0) best = found;
    reasons = found.support.reason();
  }
  best.support = Support::no("no usable NCCL: " + reasons);
  return best;
}

NcclSearch find_nccl() {
  std::vector<std::string> paths = {kName};
  if (std::string beside = path_beside_this_library(); !beside.empty()) {
    paths.push_back(std::move(beside));
  }
  return find_nccl_among(paths);
}

Support has_windows(const NcclLibrary& library) {
  const NcclWindowCalls& calls = library.windows;
  if (library.version < kOldestWindows) {
    return Support::no(fmt::format("NCCL {} has no windows; {} is the first with them",
                                   nccl_version_text(library.version),
                                   nccl_version_text(kOldestWindows)));
  }
  const bool has_addresses = library.version < kWindowsByCall
                                 ? calls.team_lsa != nullptr
                                 : calls.get_peer_device_pointer != nullptr;
  if (has_addresses && calls.mem_alloc != nullptr && calls.mem_free != nullptr &&
      calls.window_register != nullptr && calls.window_deregister != nullptr) {
    return Support::yes();
  }
  return Support::no(library.path + " lacks functions of windows");
}

std::string nccl_version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

void check_nccl(const NcclLibrary& library, NcclResult result, const char* call) {
  if (result == kNcclSuccess) return;
  throw Error(ErrorCode::kDevice,
              {.what = std::string(call) + " failed", .found = library.get_error_string(result)});
}

}  // namespace conclave::inline v0::comm
