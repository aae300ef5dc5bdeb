// The read loop for the Vector type of the file that includes it. It is in an unnamed namespace
// because each including file is compiled for another instruction set and must keep its own copy.
#include "cpu/ceilings/probe_functions.h"

namespace conclave::inline v0::cpu::ceilings {
namespace {

// `Vector` has Register, kBytes, zero(), load(pointer), combine(a, b) and sum(register).
// The block is cut into kStreams parts that are read in turn, one kilobyte of each at a time.
template <class Vector, size_t kStreams, size_t kPrefetchBytes>
uint64_t read_streams(const std::byte* data, size_t bytes) {
  constexpr size_t kRun = 1024;
  constexpr size_t kAccumulators = 8;
  static_assert(kReadGranule % (kStreams * kRun) == 0);
  const size_t stream_bytes = bytes / kStreams;
  typename Vector::Register sums[kAccumulators];
  for (auto& sum : sums) sum = Vector::zero();
  for (size_t offset = 0; offset < stream_bytes; offset += kRun) {
    for (size_t stream = 0; stream < kStreams; ++stream) {
      const std::byte* run = data + stream * stream_bytes + offset;
      for (size_t i = 0; i < kRun; i += kAccumulators * Vector::kBytes) {
        if constexpr (kPrefetchBytes != 0) {
          for (size_t line = 0; line < kAccumulators * Vector::kBytes; line += 64) {
            __builtin_prefetch(run + i + line + kPrefetchBytes);
          }
        }
        for (size_t lane = 0; lane < kAccumulators; ++lane) {
          sums[lane] = Vector::combine(sums[lane], Vector::load(run + i + lane * Vector::kBytes));
        }
      }
    }
  }
  for (size_t lane = 1; lane < kAccumulators; ++lane) {
    sums[0] = Vector::combine(sums[0], sums[lane]);
  }
  return Vector::sum(sums[0]);
}

template <class Vector>
constexpr ReadFunctions read_functions() {
  constexpr size_t kAhead = 1024;
  return {.one_stream = read_streams<Vector, 1, 0>,
          .one_stream_prefetch = read_streams<Vector, 1, kAhead>,
          .two_streams = read_streams<Vector, 2, 0>,
          .four_streams = read_streams<Vector, 4, 0>,
          .four_streams_prefetch = read_streams<Vector, 4, kAhead>};
}

}  // namespace
}  // namespace conclave::inline v0::cpu::ceilings
