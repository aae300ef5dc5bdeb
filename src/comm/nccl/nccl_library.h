// The functions of NCCL that this transport calls, found at run time: a build needs no NCCL.
#pragma once

#include "conclave/error.h"
#include "conclave/version.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// NCCL calls a pointer to this ncclComm_t.
struct ncclComm;
struct CUstream_st;

namespace conclave::inline v0::comm {

// The types of NCCL's binary interface, under our names.
using NcclResult = int;
inline constexpr NcclResult kNcclSuccess = 0;
inline constexpr NcclResult kNcclRemoteError = 6;
inline constexpr NcclResult kNcclInProgress = 7;
inline constexpr int kNcclByte = 1;  // ncclUint8
struct NcclUniqueId {
  char bytes[128];
};
// Version 2.14 knows these of a configuration: later ones take their defaults for the rest.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = 1;
};

struct NcclLibrary {
  int version = 0;   // 22803 is 2.28.3
  std::string path;  // where it was found

  NcclResult (*get_version)(int*) = nullptr;
  const char* (*get_error_string)(NcclResult) = nullptr;
  NcclResult (*get_unique_id)(NcclUniqueId*) = nullptr;
  NcclResult (*comm_init_rank_config)(ncclComm**, int, NcclUniqueId, int, NcclConfig*) = nullptr;
  NcclResult (*comm_split)(ncclComm*, int, int, ncclComm**, NcclConfig*) = nullptr;
  NcclResult (*comm_abort)(ncclComm*) = nullptr;
  NcclResult (*comm_get_async_error)(ncclComm*, NcclResult*) = nullptr;
  NcclResult (*comm_count)(const ncclComm*, int*) = nullptr;
  NcclResult (*comm_user_rank)(const ncclComm*, int*) = nullptr;
  NcclResult (*comm_cu_device)(const ncclComm*, int*) = nullptr;
  NcclResult (*group_start)() = nullptr;
  NcclResult (*group_end)() = nullptr;
  NcclResult (*send)(const void*, size_t, int, int, ncclComm*, CUstream_st*) = nullptr;
  NcclResult (*recv)(void*, size_t, int, int, ncclComm*, CUstream_st*) = nullptr;
};

// Yes with a library whose functions are all there, or the reason. It stays loaded.
struct NcclSearch {
  Support support = Support::no("");
  NcclLibrary library;
};
// Looks where the loader does, which takes one that the process has already, then in a Python
// package beside this library's own.
NcclSearch find_nccl();
// Tries these files in order.
NcclSearch find_nccl_among(const std::vector<std::string>& paths);

std::string nccl_version_text(int version);  // "2.28.3"

// Throws Error(kDevice) that names the call.
void check_nccl(const NcclLibrary& library, NcclResult result, const char* call);

}  // namespace conclave::inline v0::comm
