// Eight elements at a time between memory and float32 registers.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0::cuda::device {

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

// Rounds to nearest even; NaN stays NaN.
template <class T>
__device__ __forceinline__ T narrow(float value);
template <>
__device__ __forceinline__ float narrow<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Two rounded values in a word, `low` in its lower half.
template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Loads 16 bytes that are read once and evicted first. It may read what an earlier kernel wrote.
__device__ __forceinline__ uint4 load_once_16(const void* source) {
  return __ldcs(static_cast<const uint4*>(source));
}

// Widens the eight 16-bit elements of 16 bytes.
template <class T>
__device__ __forceinline__ void widen_8(const uint4& bits, float (&values)[8]);
template <>
__device__ __forceinline__ void widen_8<__nv_bfloat16>(const uint4& bits, float (&values)[8]) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(words[i] << 16);
    values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000U);
  }
}
template <>
__device__ __forceinline__ void widen_8<__half>(const uint4& bits, float (&values)[8]) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto low = static_cast<unsigned short>(words[i] & 0xffffU);
    const auto high = static_cast<unsigned short>(words[i] >> 16);
    values[2 * i] = __half2float(__ushort_as_half(low));
    values[2 * i + 1] = __half2float(__ushort_as_half(high));
  }
}

// Eight unconverted elements that are read once; the address is a multiple of 16 bytes.
template <class T>
struct Raw8 {
  uint4 words[sizeof(T) / 2];

  __device__ __forceinline__ void load_once(const T* source) {
#pragma unroll
    for (size_t i = 0; i < sizeof(T) / 2; ++i)
      words[i] = load_once_16(source + i * (16 / sizeof(T)));
  }
  __device__ __forceinline__ void widen_to(float (&values)[8]) const {
    if constexpr (sizeof(T) == 2) {
      widen_8<T>(words[0], values);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        values[4 * i] = __uint_as_float(words[i].x);
        values[4 * i + 1] = __uint_as_float(words[i].y);
        values[4 * i + 2] = __uint_as_float(words[i].z);
        values[4 * i + 3] = __uint_as_float(words[i].w);
      }
    }
  }
};

// Addresses are multiples of 16 bytes.
template <class T>
__device__ __forceinline__ void load_8(const T* source, float (&values)[8]) {
  widen_8<T>(*reinterpret_cast<const uint4*>(source), values);
}
__device__ __forceinline__ void load_8(const float* source, float (&values)[8]) {
  const float4 first = reinterpret_cast<const float4*>(source)[0];
  const float4 second = reinterpret_cast<const float4*>(source)[1];
  values[0] = first.x, values[1] = first.y, values[2] = first.z, values[3] = first.w;
  values[4] = second.x, values[5] = second.y, values[6] = second.z, values[7] = second.w;
}
template <class T>
__device__ __forceinline__ void store_8(const float (&values)[8], T* destination) {
  union {
    T elements[8];
    uint4 bits;
  } packed;
#pragma unroll
  for (int i = 0; i < 8; ++i) packed.elements[i] = narrow<T>(values[i]);
  *reinterpret_cast<uint4*>(destination) = packed.bits;
}
__device__ __forceinline__ void store_8(const float (&values)[8], float* destination) {
  auto* to = reinterpret_cast<float4*>(destination);
  to[0] = make_float4(values[0], values[1], values[2], values[3]);
  to[1] = make_float4(values[4], values[5], values[6], values[7]);
}

}  // namespace conclave::inline v0::cuda::device
