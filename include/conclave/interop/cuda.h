// Converts CUDA streams to and from the library's Stream. Needs no CUDA header: cudaStream_t and
// CUstream are the pointer type that is declared here.
#pragma once

#include "conclave/context.h"

struct CUstream_st;

namespace conclave::inline v0 {

// A null stream is CUDA's legacy default stream; it is named explicitly (as cudaStreamLegacy),
// since null means "no stream" to the library.
inline Stream to_stream(CUstream_st* stream) noexcept {
  constexpr uintptr_t kLegacyStream = 1;
  return {stream != nullptr ? static_cast<void*>(stream) : reinterpret_cast<void*>(kLegacyStream)};
}

inline CUstream_st* to_cuda(Stream stream) noexcept {
  return static_cast<CUstream_st*>(stream.handle);
}

}  // namespace conclave::inline v0
