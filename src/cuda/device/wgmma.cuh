// wgmma: D[64, N] (+)= A[64, K] B[N, K]^T of a warpgroup, A and B in shared memory, both with K
// contiguous, D in float32 registers, or int32 ones for int8. K is 32 bytes of elements: 16 of bf16
// and f16, 32 of e4m3, e5m2 and int8.
//
// Thread t of the warpgroup, w = t / 32, l = t % 32, holds these sums for j in [0, N / 8):
//   d[4j], d[4j + 1]      row 16 w + l / 4,      columns 8 j + 2 (l % 4) and the next
//   d[4j + 2], d[4j + 3]  row 16 w + l / 4 + 8,  the same columns
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace conclave::inline v0::cuda::device {

// Settles the registers that wgmma reads or writes before the next wgmma.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending groups of this warpgroup are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving a register's use across a wait.
__device__ __forceinline__ void wgmma_fence_operand(float& value) {
  asm volatile("" : "+f"(value)::"memory");
}
__device__ __forceinline__ void wgmma_fence_operand(int32_t& value) {
  asm volatile("" : "+r"(value)::"memory");
}

// The descriptor of rows of 128 bytes, 128-byte swizzled as TMA writes them: 8 rows to a 1024-byte
// atom, atoms one after another. `address` is that of a 1024-byte aligned tile in the shared
// window, plus the byte offset of the K slice (0, 32, 64, 96).
__device__ __forceinline__ uint64_t wgmma_descriptor_128b(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kStrideBytes = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kLeadingBytes = uint64_t{1} << 16;  // unused with a swizzle
  return kSwizzle128 | kStrideBytes | kLeadingBytes | ((address & 0x3FFFF) >> 4);
}

// The same through its low word, address / 16 + 2^16: sums of low words need no carry.
__device__ __forceinline__ uint32_t wgmma_descriptor_low(uint32_t address) {
  return (uint32_t{1} << 16) | ((address & 0x3FFFF) >> 4);
}
__device__ __forceinline__ uint64_t wgmma_descriptor_of_low(uint32_t low) {
  constexpr uint32_t kHigh = (uint32_t{1} << 30) | (1024 >> 4);
  uint64_t descriptor = 0;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(kHigh));
  return descriptor;
}

// Rows of A are e4m3, those of B e5m2.
struct E4m3TimesE5m2;

// Wgmma<T, N>::mma(d, a, b, accumulate): D = A B + (accumulate ? D : 0).
template <class T, int N>
struct Wgmma;

// Operand lists of N / 2 accumulators, four at a time; r is the kind of their registers.
// clang-format off
#define CONCLAVE_D4(r, d, i) r((d)[(i)]), r((d)[(i) + 1]), r((d)[(i) + 2]), r((d)[(i) + 3])

#define CONCLAVE_D_8(r, d) \
  CONCLAVE_D4(r, d, 0)
#define CONCLAVE_R_8 \
  "{%0, %1, %2, %3}"
#define CONCLAVE_D_16(r, d) \
  CONCLAVE_D4(r, d, 0), CONCLAVE_D4(r, d, 4)
#define CONCLAVE_R_16 \
  "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define CONCLAVE_D_24(r, d) \
  CONCLAVE_D4(r, d, 0), CONCLAVE_D4(r, d, 4), CONCLAVE_D4(r, d, 8)
#define CONCLAVE_R_24 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}"
#define CONCLAVE_D_32(r, d) \
  CONCLAVE_D4(r, d, 0), CONCLAVE_D4(r, d, 4), CONCLAVE_D4(r, d, 8), CONCLAVE_D4(r, d, 12)
#define CONCLAVE_R_32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define CONCLAVE_D_48(r, d) \
  CONCLAVE_D4(r, d, 0), CONCLAVE_D4(r, d, 4), CONCLAVE_D4(r, d, 8), CONCLAVE_D4(r, d, 12), CONCLAVE_D4(r, d, 16), \
  CONCLAVE_D4(r, d, 20)
#define CONCLAVE_R_48 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23}"
#define CONCLAVE_D_64(r, d) \
  CONCLAVE_D4(r, d, 0), CONCLAVE_D4(r, d, 4), CONCLAVE_D4(r, d, 8), CONCLAVE_D4(r, d, 12), CONCLAVE_D4(r, d, 16), \
  CONCLAVE_D4(r, d, 20), CONCLAVE_D4(r, d, 24), CONCLAVE_D4(r, d, 28)
#define CONCLAVE_R_64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define CONCLAVE_D_80(r, d) \
  CONCLAVE_D4(r, d, 0), CONCLAVE_D4(r, d, 4), CONCLAVE_D4(r, d, 8), CONCLAVE_D4(r, d, 12), CONCLAVE_D4(r, d, 16), \
  CONCLAVE_D4(r, d, 20), CONCLAVE_D4(r, d, 24), CONCLAVE_D4(r, d, 28), CONCLAVE_D4(r, d, 32), CONCLAVE_D4(r, d, 36)
#define CONCLAVE_R_80 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39}"
#define CONCLAVE_D_96(r, d) \
  CONCLAVE_D4(r, d, 0), CONCLAVE_D4(r, d, 4), CONCLAVE_D4(r, d, 8), CONCLAVE_D4(r, d, 12), CONCLAVE_D4(r, d, 16), \
  CONCLAVE_D4(r, d, 20), CONCLAVE_D4(r, d, 24), CONCLAVE_D4(r, d, 28), CONCLAVE_D4(r, d, 32), CONCLAVE_D4(r, d, 36), \
  CONCLAVE_D4(r, d, 40), CONCLAVE_D4(r, d, 44)
#define CONCLAVE_R_96 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}"
#define CONCLAVE_D_112(r, d) \
  CONCLAVE_D4(r, d, 0), CONCLAVE_D4(r, d, 4), CONCLAVE_D4(r, d, 8), CONCLAVE_D4(r, d, 12), CONCLAVE_D4(r, d, 16), \
  CONCLAVE_D4(r, d, 20), CONCLAVE_D4(r, d, 24), CONCLAVE_D4(r, d, 28), CONCLAVE_D4(r, d, 32), CONCLAVE_D4(r, d, 36), \
  CONCLAVE_D4(r, d, 40), CONCLAVE_D4(r, d, 44), CONCLAVE_D4(r, d, 48), CONCLAVE_D4(r, d, 52)
#define CONCLAVE_R_112 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55}"
#define CONCLAVE_D_120(r, d) \
  CONCLAVE_D4(r, d, 0), CONCLAVE_D4(r, d, 4), CONCLAVE_D4(r, d, 8), CONCLAVE_D4(r, d, 12), CONCLAVE_D4(r, d, 16), \
  CONCLAVE_D4(r, d, 20), CONCLAVE_D4(r, d, 24), CONCLAVE_D4(r, d, 28), CONCLAVE_D4(r, d, 32), CONCLAVE_D4(r, d, 36), \
  CONCLAVE_D4(r, d, 40), CONCLAVE_D4(r, d, 44), CONCLAVE_D4(r, d, 48), CONCLAVE_D4(r, d, 52), CONCLAVE_D4(r, d, 56)
#define CONCLAVE_R_120 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59}"
#define CONCLAVE_D_128(r, d) \
  CONCLAVE_D4(r, d, 0), CONCLAVE_D4(r, d, 4), CONCLAVE_D4(r, d, 8), CONCLAVE_D4(r, d, 12), CONCLAVE_D4(r, d, 16), \
  CONCLAVE_D4(r, d, 20), CONCLAVE_D4(r, d, 24), CONCLAVE_D4(r, d, 28), CONCLAVE_D4(r, d, 32), CONCLAVE_D4(r, d, 36), \
  CONCLAVE_D4(r, d, 40), CONCLAVE_D4(r, d, 44), CONCLAVE_D4(r, d, 48), CONCLAVE_D4(r, d, 52), CONCLAVE_D4(r, d, 56), \
  CONCLAVE_D4(r, d, 60)
#define CONCLAVE_R_128 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define CONCLAVE_D_136(r, d) \
  CONCLAVE_D4(r, d, 0), CONCLAVE_D4(r, d, 4), CONCLAVE_D4(r, d, 8), CONCLAVE_D4(r, d, 12), CONCLAVE_D4(r, d, 16), \
  CONCLAVE_D4(r, d, 20), CONCLAVE_D4(r, d, 24), CONCLAVE_D4(r, d, 28), CONCLAVE_D4(r, d, 32), CONCLAVE_D4(r, d, 36), \
  CONCLAVE_D4(r, d, 40), CONCLAVE_D4(r, d, 44), CONCLAVE_D4(r, d, 48), CONCLAVE_D4(r, d, 52), CONCLAVE_D4(r, d, 56), \
  CONCLAVE_D4(r, d, 60), CONCLAVE_D4(r, d, 64)
#define CONCLAVE_R_136 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67}"
#define CONCLAVE_D_144(r, d) \
  CONCLAVE_D4(r, d, 0), CONCLAVE_D4(r, d, 4), CONCLAVE_D4(r, d, 8), CONCLAVE_D4(r, d, 12), CONCLAVE_D4(r, d, 16), \
  CONCLAVE_D4(r, d, 20), CONCLAVE_D4(r, d, 24), CONCLAVE_D4(r, d, 28), CONCLAVE_D4(r, d, 32), CONCLAVE_D4(r, d, 36), \
  CONCLAVE_D4(r, d, 40), CONCLAVE_D4(r, d, 44), CONCLAVE_D4(r, d, 48), CONCLAVE_D4(r, d, 52), CONCLAVE_D4(r, d, 56), \
  CONCLAVE_D4(r, d, 60), CONCLAVE_D4(r, d, 64), CONCLAVE_D4(r, d, 68)
#define CONCLAVE_R_144 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71}"
#define CONCLAVE_D_160(r, d) \
  CONCLAVE_D4(r, d, 0), CONCLAVE_D4(r, d, 4), CONCLAVE_D4(r, d, 8), CONCLAVE_D4(r, d, 12), CONCLAVE_D4(r, d, 16), \
  CONCLAVE_D4(r, d, 20), CONCLAVE_D4(r, d, 24), CONCLAVE_D4(r, d, 28), CONCLAVE_D4(r, d, 32), CONCLAVE_D4(r, d, 36), \
  CONCLAVE_D4(r, d, 40), CONCLAVE_D4(r, d, 44), CONCLAVE_D4(r, d, 48), CONCLAVE_D4(r, d, 52), CONCLAVE_D4(r, d, 56), \
  CONCLAVE_D4(r, d, 60), CONCLAVE_D4(r, d, 64), CONCLAVE_D4(r, d, 68), CONCLAVE_D4(r, d, 72), CONCLAVE_D4(r, d, 76)
#define CONCLAVE_R_160 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}"
#define CONCLAVE_D_192(r, d) \
  CONCLAVE_D4(r, d, 0), CONCLAVE_D4(r, d, 4), CONCLAVE_D4(r, d, 8), CONCLAVE_D4(r, d, 12), CONCLAVE_D4(r, d, 16), \
  CONCLAVE_D4(r, d, 20), CONCLAVE_D4(r, d, 24), CONCLAVE_D4(r, d, 28), CONCLAVE_D4(r, d, 32), CONCLAVE_D4(r, d, 36), \
  CONCLAVE_D4(r, d, 40), CONCLAVE_D4(r, d, 44), CONCLAVE_D4(r, d, 48), CONCLAVE_D4(r, d, 52), CONCLAVE_D4(r, d, 56), \
  CONCLAVE_D4(r, d, 60), CONCLAVE_D4(r, d, 64), CONCLAVE_D4(r, d, 68), CONCLAVE_D4(r, d, 72), CONCLAVE_D4(r, d, 76), \
  CONCLAVE_D4(r, d, 80), CONCLAVE_D4(r, d, 84), CONCLAVE_D4(r, d, 88), CONCLAVE_D4(r, d, 92)
#define CONCLAVE_R_192 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}"
#define CONCLAVE_D_224(r, d) \
  CONCLAVE_D4(r, d, 0), CONCLAVE_D4(r, d, 4), CONCLAVE_D4(r, d, 8), CONCLAVE_D4(r, d, 12), CONCLAVE_D4(r, d, 16), \
  CONCLAVE_D4(r, d, 20), CONCLAVE_D4(r, d, 24), CONCLAVE_D4(r, d, 28), CONCLAVE_D4(r, d, 32), CONCLAVE_D4(r, d, 36), \
  CONCLAVE_D4(r, d, 40), CONCLAVE_D4(r, d, 44), CONCLAVE_D4(r, d, 48), CONCLAVE_D4(r, d, 52), CONCLAVE_D4(r, d, 56), \
  CONCLAVE_D4(r, d, 60), CONCLAVE_D4(r, d, 64), CONCLAVE_D4(r, d, 68), CONCLAVE_D4(r, d, 72), CONCLAVE_D4(r, d, 76), \
  CONCLAVE_D4(r, d, 80), CONCLAVE_D4(r, d, 84), CONCLAVE_D4(r, d, 88), CONCLAVE_D4(r, d, 92), CONCLAVE_D4(r, d, 96), \
  CONCLAVE_D4(r, d, 100), CONCLAVE_D4(r, d, 104), CONCLAVE_D4(r, d, 108)
#define CONCLAVE_R_224 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111}"
#define CONCLAVE_D_256(r, d) \
  CONCLAVE_D4(r, d, 0), CONCLAVE_D4(r, d, 4), CONCLAVE_D4(r, d, 8), CONCLAVE_D4(r, d, 12), CONCLAVE_D4(r, d, 16), \
  CONCLAVE_D4(r, d, 20), CONCLAVE_D4(r, d, 24), CONCLAVE_D4(r, d, 28), CONCLAVE_D4(r, d, 32), CONCLAVE_D4(r, d, 36), \
  CONCLAVE_D4(r, d, 40), CONCLAVE_D4(r, d, 44), CONCLAVE_D4(r, d, 48), CONCLAVE_D4(r, d, 52), CONCLAVE_D4(r, d, 56), \
  CONCLAVE_D4(r, d, 60), CONCLAVE_D4(r, d, 64), CONCLAVE_D4(r, d, 68), CONCLAVE_D4(r, d, 72), CONCLAVE_D4(r, d, 76), \
  CONCLAVE_D4(r, d, 80), CONCLAVE_D4(r, d, 84), CONCLAVE_D4(r, d, 88), CONCLAVE_D4(r, d, 92), CONCLAVE_D4(r, d, 96), \
  CONCLAVE_D4(r, d, 100), CONCLAVE_D4(r, d, 104), CONCLAVE_D4(r, d, 108), CONCLAVE_D4(r, d, 112), CONCLAVE_D4(r, d, 116), \
  CONCLAVE_D4(r, d, 120), CONCLAVE_D4(r, d, 124)
#define CONCLAVE_R_256 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"

template <>
struct Wgmma<__nv_bfloat16, 8> {
  static __device__ __forceinline__ void mma(float (&d)[4], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 " CONCLAVE_R_8
        ", %4, %5, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_8("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 16> {
  static __device__ __forceinline__ void mma(float (&d)[8], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 " CONCLAVE_R_16
        ", %8, %9, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_16("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 24> {
  static __device__ __forceinline__ void mma(float (&d)[12], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %14, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 " CONCLAVE_R_24
        ", %12, %13, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_24("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 32> {
  static __device__ __forceinline__ void mma(float (&d)[16], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " CONCLAVE_R_32
        ", %16, %17, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_32("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 48> {
  static __device__ __forceinline__ void mma(float (&d)[24], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %26, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 " CONCLAVE_R_48
        ", %24, %25, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_48("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 64> {
  static __device__ __forceinline__ void mma(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " CONCLAVE_R_64
        ", %32, %33, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_64("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 80> {
  static __device__ __forceinline__ void mma(float (&d)[40], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 " CONCLAVE_R_80
        ", %40, %41, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_80("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 96> {
  static __device__ __forceinline__ void mma(float (&d)[48], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 " CONCLAVE_R_96
        ", %48, %49, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_96("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 112> {
  static __device__ __forceinline__ void mma(float (&d)[56], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %58, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 " CONCLAVE_R_112
        ", %56, %57, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_112("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 120> {
  static __device__ __forceinline__ void mma(float (&d)[60], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %62, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n120k16.f32.bf16.bf16 " CONCLAVE_R_120
        ", %60, %61, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_120("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 128> {
  static __device__ __forceinline__ void mma(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " CONCLAVE_R_128
        ", %64, %65, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_128("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 136> {
  static __device__ __forceinline__ void mma(float (&d)[68], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %70, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n136k16.f32.bf16.bf16 " CONCLAVE_R_136
        ", %68, %69, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_136("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 144> {
  static __device__ __forceinline__ void mma(float (&d)[72], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %74, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16 " CONCLAVE_R_144
        ", %72, %73, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_144("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 160> {
  static __device__ __forceinline__ void mma(float (&d)[80], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 " CONCLAVE_R_160
        ", %80, %81, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_160("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 192> {
  static __device__ __forceinline__ void mma(float (&d)[96], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 " CONCLAVE_R_192
        ", %96, %97, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_192("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 224> {
  static __device__ __forceinline__ void mma(float (&d)[112], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %114, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n224k16.f32.bf16.bf16 " CONCLAVE_R_224
        ", %112, %113, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_224("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_bfloat16, 256> {
  static __device__ __forceinline__ void mma(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " CONCLAVE_R_256
        ", %128, %129, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_256("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 8> {
  static __device__ __forceinline__ void mma(float (&d)[4], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 " CONCLAVE_R_8
        ", %4, %5, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_8("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 16> {
  static __device__ __forceinline__ void mma(float (&d)[8], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 " CONCLAVE_R_16
        ", %8, %9, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_16("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 24> {
  static __device__ __forceinline__ void mma(float (&d)[12], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %14, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16 " CONCLAVE_R_24
        ", %12, %13, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_24("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 32> {
  static __device__ __forceinline__ void mma(float (&d)[16], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 " CONCLAVE_R_32
        ", %16, %17, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_32("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 48> {
  static __device__ __forceinline__ void mma(float (&d)[24], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %26, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 " CONCLAVE_R_48
        ", %24, %25, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_48("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 64> {
  static __device__ __forceinline__ void mma(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " CONCLAVE_R_64
        ", %32, %33, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_64("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 80> {
  static __device__ __forceinline__ void mma(float (&d)[40], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 " CONCLAVE_R_80
        ", %40, %41, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_80("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 96> {
  static __device__ __forceinline__ void mma(float (&d)[48], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 " CONCLAVE_R_96
        ", %48, %49, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_96("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 112> {
  static __device__ __forceinline__ void mma(float (&d)[56], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %58, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n112k16.f32.f16.f16 " CONCLAVE_R_112
        ", %56, %57, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_112("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 120> {
  static __device__ __forceinline__ void mma(float (&d)[60], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %62, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n120k16.f32.f16.f16 " CONCLAVE_R_120
        ", %60, %61, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_120("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 128> {
  static __device__ __forceinline__ void mma(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " CONCLAVE_R_128
        ", %64, %65, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_128("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 136> {
  static __device__ __forceinline__ void mma(float (&d)[68], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %70, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n136k16.f32.f16.f16 " CONCLAVE_R_136
        ", %68, %69, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_136("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 144> {
  static __device__ __forceinline__ void mma(float (&d)[72], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %74, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n144k16.f32.f16.f16 " CONCLAVE_R_144
        ", %72, %73, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_144("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 160> {
  static __device__ __forceinline__ void mma(float (&d)[80], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n160k16.f32.f16.f16 " CONCLAVE_R_160
        ", %80, %81, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_160("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 192> {
  static __device__ __forceinline__ void mma(float (&d)[96], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 " CONCLAVE_R_192
        ", %96, %97, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_192("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 224> {
  static __device__ __forceinline__ void mma(float (&d)[112], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %114, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n224k16.f32.f16.f16 " CONCLAVE_R_224
        ", %112, %113, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_224("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__half, 256> {
  static __device__ __forceinline__ void mma(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " CONCLAVE_R_256
        ", %128, %129, p, 1, 1, 0, 0;\n}\n"
        : CONCLAVE_D_256("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_fp8_e4m3, 8> {
  static __device__ __forceinline__ void mma(float (&d)[4], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 " CONCLAVE_R_8
        ", %4, %5, p, 1, 1;\n}\n"
        : CONCLAVE_D_8("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_fp8_e4m3, 16> {
  static __device__ __forceinline__ void mma(float (&d)[8], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 " CONCLAVE_R_16
        ", %8, %9, p, 1, 1;\n}\n"
        : CONCLAVE_D_16("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_fp8_e4m3, 24> {
  static __device__ __forceinline__ void mma(float (&d)[12], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %14, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k32.f32.e4m3.e4m3 " CONCLAVE_R_24
        ", %12, %13, p, 1, 1;\n}\n"
        : CONCLAVE_D_24("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_fp8_e4m3, 32> {
  static __device__ __forceinline__ void mma(float (&d)[16], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 " CONCLAVE_R_32
        ", %16, %17, p, 1, 1;\n}\n"
        : CONCLAVE_D_32("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_fp8_e4m3, 48> {
  static __device__ __forceinline__ void mma(float (&d)[24], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %26, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k32.f32.e4m3.e4m3 " CONCLAVE_R_48
        ", %24, %25, p, 1, 1;\n}\n"
        : CONCLAVE_D_48("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_fp8_e4m3, 64> {
  static __device__ __forceinline__ void mma(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " CONCLAVE_R_64
        ", %32, %33, p, 1, 1;\n}\n"
        : CONCLAVE_D_64("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_fp8_e4m3, 80> {
  static __device__ __forceinline__ void mma(float (&d)[40], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n80k32.f32.e4m3.e4m3 " CONCLAVE_R_80
        ", %40, %41, p, 1, 1;\n}\n"
        : CONCLAVE_D_80("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_fp8_e4m3, 96> {
  static __device__ __forceinline__ void mma(float (&d)[48], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 " CONCLAVE_R_96
        ", %48, %49, p, 1, 1;\n}\n"
        : CONCLAVE_D_96("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_fp8_e4m3, 112> {
  static __device__ __forceinline__ void mma(float (&d)[56], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %58, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n112k32.f32.e4m3.e4m3 " CONCLAVE_R_112
        ", %56, %57, p, 1, 1;\n}\n"
        : CONCLAVE_D_112("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_fp8_e4m3, 128> {
  static __device__ __forceinline__ void mma(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " CONCLAVE_R_128
        ", %64, %65, p, 1, 1;\n}\n"
        : CONCLAVE_D_128("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<E4m3TimesE5m2, 128> {
  static __device__ __forceinline__ void mma(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e5m2 " CONCLAVE_R_128
        ", %64, %65, p, 1, 1;\n}\n"
        : CONCLAVE_D_128("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_fp8_e4m3, 160> {
  static __device__ __forceinline__ void mma(float (&d)[80], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n160k32.f32.e4m3.e4m3 " CONCLAVE_R_160
        ", %80, %81, p, 1, 1;\n}\n"
        : CONCLAVE_D_160("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_fp8_e4m3, 192> {
  static __device__ __forceinline__ void mma(float (&d)[96], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e4m3 " CONCLAVE_R_192
        ", %96, %97, p, 1, 1;\n}\n"
        : CONCLAVE_D_192("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_fp8_e4m3, 224> {
  static __device__ __forceinline__ void mma(float (&d)[112], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %114, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n224k32.f32.e4m3.e4m3 " CONCLAVE_R_224
        ", %112, %113, p, 1, 1;\n}\n"
        : CONCLAVE_D_224("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<__nv_fp8_e4m3, 256> {
  static __device__ __forceinline__ void mma(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 " CONCLAVE_R_256
        ", %128, %129, p, 1, 1;\n}\n"
        : CONCLAVE_D_256("+f", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<int8_t, 8> {
  static __device__ __forceinline__ void mma(int32_t (&d)[4], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 " CONCLAVE_R_8
        ", %4, %5, p;\n}\n"
        : CONCLAVE_D_8("+r", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<int8_t, 16> {
  static __device__ __forceinline__ void mma(int32_t (&d)[8], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 " CONCLAVE_R_16
        ", %8, %9, p;\n}\n"
        : CONCLAVE_D_16("+r", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<int8_t, 32> {
  static __device__ __forceinline__ void mma(int32_t (&d)[16], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 " CONCLAVE_R_32
        ", %16, %17, p;\n}\n"
        : CONCLAVE_D_32("+r", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<int8_t, 48> {
  static __device__ __forceinline__ void mma(int32_t (&d)[24], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %26, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k32.s32.s8.s8 " CONCLAVE_R_48
        ", %24, %25, p;\n}\n"
        : CONCLAVE_D_48("+r", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<int8_t, 64> {
  static __device__ __forceinline__ void mma(int32_t (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 " CONCLAVE_R_64
        ", %32, %33, p;\n}\n"
        : CONCLAVE_D_64("+r", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<int8_t, 80> {
  static __device__ __forceinline__ void mma(int32_t (&d)[40], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n80k32.s32.s8.s8 " CONCLAVE_R_80
        ", %40, %41, p;\n}\n"
        : CONCLAVE_D_80("+r", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
template <>
struct Wgmma<int8_t, 128> {
  static __device__ __forceinline__ void mma(int32_t (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 " CONCLAVE_R_128
        ", %64, %65, p;\n}\n"
        : CONCLAVE_D_128("+r", d)
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));
  }
};
#undef CONCLAVE_D_8
#undef CONCLAVE_R_8
#undef CONCLAVE_D_16
#undef CONCLAVE_R_16
#undef CONCLAVE_D_24
#undef CONCLAVE_R_24
#undef CONCLAVE_D_32
#undef CONCLAVE_R_32
#undef CONCLAVE_D_48
#undef CONCLAVE_R_48
#undef CONCLAVE_D_64
#undef CONCLAVE_R_64
#undef CONCLAVE_D_80
#undef CONCLAVE_R_80
#undef CONCLAVE_D_96
#undef CONCLAVE_R_96
#undef CONCLAVE_D_112
#undef CONCLAVE_R_112
#undef CONCLAVE_D_120
#undef CONCLAVE_R_120
#undef CONCLAVE_D_128
#undef CONCLAVE_R_128
#undef CONCLAVE_D_136
#undef CONCLAVE_R_136
#undef CONCLAVE_D_144
#undef CONCLAVE_R_144
#undef CONCLAVE_D_160
#undef CONCLAVE_R_160
#undef CONCLAVE_D_192
#undef CONCLAVE_R_192
#undef CONCLAVE_D_224
#undef CONCLAVE_R_224
#undef CONCLAVE_D_256
#undef CONCLAVE_R_256
#undef CONCLAVE_D4
// clang-format on

}  // namespace conclave::inline v0::cuda::device
