// A hash of bytes in device memory that finds a damaged copy; it does not keep out an attacker.
// Equal for equal bytes, wherever they lie.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0 {

// Enqueues: adds the hash of `bytes` bytes to *sum, modulo 2^64. Another `seed` is another hash, so
// that memory in several parts is the sum over these.
void add_plane_hash(const std::byte* data, size_t bytes, uint64_t seed, uint64_t* sum,
                    CUstream_st* stream);

}  // namespace conclave::inline v0
