// The SIMD vectors of one instruction set, chosen by the including file with one of
// CONCLAVE_SIMD_AVX2, CONCLAVE_SIMD_AVX2_INT8 (the same with products of bytes),
// CONCLAVE_SIMD_AVX_VNNI, CONCLAVE_SIMD_AVX512, CONCLAVE_SIMD_AVX512_VNNI,
// CONCLAVE_SIMD_AVX512_BF16, CONCLAVE_SIMD_AVX512_VBMI (the same with permutations of bytes),
// CONCLAVE_SIMD_AMX, CONCLAVE_SIMD_AMX_INT8; or those of the header that CONCLAVE_SIMD_EMULATED
// names, with which tests run a kernel on any CPU.
//
// All code of *-inl.h lives in a namespace per instruction set and calls no inline function of
// the standard library: the linker keeps one copy of an inline function, and it must not be one
// that was compiled for an instruction set which the running CPU lacks.
#pragma once

#define CONCLAVE_KERNEL_INLINE inline __attribute__((always_inline))

#if defined(CONCLAVE_SIMD_AVX2)
#define CONCLAVE_ISA_NAMESPACE isa_avx2
#include "gemm/cpu/simd_avx2-inl.h"
#elif defined(CONCLAVE_SIMD_AVX2_INT8)
#define CONCLAVE_ISA_NAMESPACE isa_avx2_int8
#include "gemm/cpu/byte_product_avx2-inl.h"
#include "gemm/cpu/wholes_avx2-inl.h"
#elif defined(CONCLAVE_SIMD_AVX_VNNI)
#define CONCLAVE_ISA_NAMESPACE isa_avx_vnni
#include "gemm/cpu/byte_product_avx_vnni-inl.h"
#include "gemm/cpu/wholes_avx2-inl.h"
#elif defined(CONCLAVE_SIMD_AVX512)
#define CONCLAVE_ISA_NAMESPACE isa_avx512
#include "gemm/cpu/simd_avx512-inl.h"
#elif defined(CONCLAVE_SIMD_AVX512_VNNI)
#define CONCLAVE_ISA_NAMESPACE isa_avx512_vnni
#include "gemm/cpu/wholes_avx512-inl.h"
#elif defined(CONCLAVE_SIMD_AVX512_BF16)
#define CONCLAVE_ISA_NAMESPACE isa_avx512_bf16
#include "gemm/cpu/simd_avx512-inl.h"
#elif defined(CONCLAVE_SIMD_AVX512_VBMI)
#define CONCLAVE_ISA_NAMESPACE isa_avx512_vbmi
#include "gemm/cpu/pairs_avx512-inl.h"
#elif defined(CONCLAVE_SIMD_AMX)
#define CONCLAVE_ISA_NAMESPACE isa_amx
#include "gemm/cpu/pairs_avx512-inl.h"
#elif defined(CONCLAVE_SIMD_AMX_INT8)
#define CONCLAVE_ISA_NAMESPACE isa_amx_int8
#include "gemm/cpu/wholes_avx512-inl.h"
#elif defined(CONCLAVE_SIMD_EMULATED)
#define CONCLAVE_ISA_NAMESPACE isa_emulated
#include CONCLAVE_SIMD_EMULATED
#else
#error "define the instruction set before including simd-inl.h"
#endif
