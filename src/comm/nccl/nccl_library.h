// The functions of NCCL that this transport calls, found at run time: a build needs no NCCL.
#pragma once

#include "conclave/error.h"
#include "conclave/version.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// NCCL calls pointers to these ncclComm_t and ncclWindow_t.
struct ncclComm;
struct ncclWindow_vidmem;
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

// Ranks that reach each other's memory by loads and stores: `ranks` of them, this one at `rank`.
struct NcclTeam {
  int ranks = 0;
  int rank = 0;
  int stride = 0;
};

// Memory that peers address. Older libraries have none of these, or not all.
struct NcclWindowCalls {
  NcclResult (*mem_alloc)(void**, size_t) = nullptr;
  NcclResult (*mem_free)(void*) = nullptr;
  NcclResult (*window_register)(ncclComm*, void*, size_t, ncclWindow_vidmem**, int) = nullptr;
  NcclResult (*window_deregister)(ncclComm*, ncclWindow_vidmem*) = nullptr;
  NcclTeam (*team_lsa)(ncclComm*) = nullptr;
  // Since 2.29; 2.28 leaves addresses to what is compiled with its headers.
  NcclResult (*get_peer_device_pointer)(ncclWindow_vidmem*, size_t, int, void**) = nullptr;
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
  NcclWindowCalls windows;
};

// Whether the library has windows, and a way to their addresses that is known here.
Support has_windows(const NcclLibrary& library);

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
