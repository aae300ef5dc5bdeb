#include "cuda/launch.h"
#include "layer/cuda/plane_hash.h"

#include <algorithm>

namespace conclave::inline v0 {
namespace {

constexpr int kHashThreads = 256;
// Few, since forwards run beside them.
constexpr int64_t kMostBlocks = 16;
constexpr size_t kWordBytes = sizeof(uint64_t);

struct PlaneBytes {
  const std::byte* data;
  size_t bytes;
  uint64_t seed;
};

// Every bit of the word and of its place changes about half of the result's.
__device__ __forceinline__ uint64_t mixed(uint64_t word, uint64_t place) {
  uint64_t x = word ^ (place * 0x9E3779B97F4A7C15U);
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}

// The word at the end is filled up with zeros.
__device__ __forceinline__ uint64_t word_at(const PlaneBytes& plane, size_t index) {
  const std::byte* const from = plane.data + index * kWordBytes;
  const size_t left = plane.bytes - index * kWordBytes;
  if (left >= kWordBytes && reinterpret_cast<uintptr_t>(from) % kWordBytes == 0) {
    return *reinterpret_cast<const uint64_t*>(from);
  }
  uint64_t word = 0;
  for (size_t at = 0; at < min(left, kWordBytes); ++at) {
    word |= static_cast<uint64_t>(from[at]) << (8 * at);
  }
  return word;
}

// Sums do not depend on who adds first.
__global__ void __launch_bounds__(kHashThreads) hash_kernel(const PlaneBytes plane, uint64_t* sum) {
  const size_t words = (plane.bytes + kWordBytes - 1) / kWordBytes;
  const size_t stride = size_t{gridDim.x} * kHashThreads;
  uint64_t own = 0;
  for (size_t i = size_t{blockIdx.x} * kHashThreads + threadIdx.x; i < words; i += stride) {
    own += mixed(word_at(plane, i), plane.seed + i);
  }
  for (int offset = 16; offset > 0; offset /= 2) own += __shfl_down_sync(0xffffffffU, own, offset);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(own));
  }
}

}  // namespace

void add_plane_hash(const std::byte* data, size_t bytes, uint64_t seed, uint64_t* sum,
                    CUstream_st* stream) {
  if (bytes == 0) return;
  const auto words = static_cast<int64_t>((bytes + kWordBytes - 1) / kWordBytes);
  const int64_t blocks = std::min((words + kHashThreads - 1) / kHashThreads, kMostBlocks);
  cuda::launch("migration.hash", &hash_kernel,
               {.blocks = blocks,
                .threads = kHashThreads,
                .overlap = cuda::Overlap::kNone,
                .stream = stream},
               PlaneBytes{data, bytes, seed}, sum);
}

}  // namespace conclave::inline v0
