// Products of bytes by AVX-VNNI. Included by simd-inl.h only.
#pragma once

#include <cstdint>
#include <immintrin.h>

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Adds the products of four unsigned bytes, at most kMost, with four signed ones to each lane.
template <int32_t kMost>
CONCLAVE_KERNEL_INLINE void add_byte_products(__m256i& sum, __m256i weights, __m256i codes) {
  // Spelled out for the reason that Vec::accumulate is, and because AVX-512 has one of this name.
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(codes));
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
