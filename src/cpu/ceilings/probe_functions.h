// The loops that measure this machine's limits, one set per instruction set. The files that include
// this are compiled for one set, so it brings in no inline code of the standard library.
#pragma once

#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::cpu::ceilings {

// Reads the block once and returns something that depends on every vector of it.
using ReadFunction = uint64_t (*)(const std::byte* data, size_t bytes);
// `bytes` must be a multiple of this.
inline constexpr size_t kReadGranule = 4096;

// CPUs differ in the fastest way to read: how many places are read in turn, and with or without
// prefetching.
struct ReadFunctions {
  ReadFunction one_stream;
  ReadFunction one_stream_prefetch;
  ReadFunction two_streams;
  ReadFunction four_streams;
  ReadFunction four_streams_prefetch;
};
extern const ReadFunctions kReadScalar;
extern const ReadFunctions kReadAvx2;
extern const ReadFunctions kReadAvx512;

// Runs `iterations` rounds of multiply-adds on registers; the result keeps them alive.
using RateFunction = float (*)(int64_t iterations);
struct RateLoop {
  RateFunction run;
  int64_t flops_per_iteration;  // multiply and add each count one
};
extern const RateLoop kF32Scalar;
extern const RateLoop kF32FmaAvx2;
extern const RateLoop kF32FmaAvx512;
extern const RateLoop kInt8DotAvx2;
extern const RateLoop kInt8DotAvxVnni;
extern const RateLoop kInt8DotAvx512;
extern const RateLoop kDpBf16Avx512;
extern const RateLoop kAmxBf16;
extern const RateLoop kInt8DotAmx;

}  // namespace conclave::inline v0::cpu::ceilings
