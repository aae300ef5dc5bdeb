// Sums of ranks' parts in rank order, with the bits of reduce_into.
#pragma once

#include "conclave/version.h"

#include <cstdint>
#include <type_traits>

namespace conclave::inline v0::comm {

template <class T>
struct Sum {
  // Whole numbers wrap.
  static __device__ __forceinline__ T join(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using Bits = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<Bits>(a) + static_cast<Bits>(b));
    } else {
      return a + b;
    }
  }
};
template <class T>
struct Max {
  static __device__ __forceinline__ T join(T a, T b) {
    if constexpr (!std::is_integral_v<T>) {
      if (b != b) return b;
    }
    return b > a ? b : a;
  }
};

inline constexpr int kSumVectorBytes = 16;

template <class T>
struct alignas(kSumVectorBytes) SumVector {
  T values[kSumVectorBytes / sizeof(T)];
};

// The sums of kCount vectors from `first` on, `step` apart, whose loads do not wait for each other.
template <class Rule, int kCount, class T, class Part>
__device__ __forceinline__ void add_vectors(const Part& part, int32_t ranks,
                                            SumVector<T> (&sums)[kCount], int64_t first,
                                            int64_t step) {
  constexpr int kWidth = kSumVectorBytes / sizeof(T);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    sums[k] = reinterpret_cast<const SumVector<T>*>(part(0))[first + k * step];
  }
  for (int32_t q = 1; q < ranks; ++q) {
    SumVector<T> next[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      next[k] = reinterpret_cast<const SumVector<T>*>(part(q))[first + k * step];
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
#pragma unroll
      for (int v = 0; v < kWidth; ++v) {
        sums[k].values[v] = Rule::join(sums[k].values[v], next[k].values[v]);
      }
    }
  }
}

// out[i] = part(0)[i] op part(1)[i] op ..., for the elements of thread `first` of `threads`.
// `aligned`: all of them to vectors.
template <class T, class Rule, class Part>
__device__ __forceinline__ void add_parts(const Part& part, int32_t ranks, T* out, int64_t count,
                                          bool aligned, int64_t first, int64_t threads) {
  constexpr int kWidth = kSumVectorBytes / sizeof(T);
  constexpr int kAhead = 4;
  const int64_t vectors = aligned ? count / kWidth : 0;
  int64_t i = first;
  for (; i + (kAhead - 1) * threads < vectors; i += kAhead * threads) {
    SumVector<T> sums[kAhead];
    add_vectors<Rule>(part, ranks, sums, i, threads);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      reinterpret_cast<SumVector<T>*>(out)[i + k * threads] = sums[k];
    }
  }
  for (; i < vectors; i += threads) {
    SumVector<T> sum[1];
    add_vectors<Rule>(part, ranks, sum, i, threads);
    reinterpret_cast<SumVector<T>*>(out)[i] = sum[0];
  }
  for (i = vectors * kWidth + first; i < count; i += threads) {
    T sum = part(0)[i];
    for (int32_t q = 1; q < ranks; ++q) sum = Rule::join(sum, part(q)[i]);
    out[i] = sum;
  }
}

}  // namespace conclave::inline v0::comm
