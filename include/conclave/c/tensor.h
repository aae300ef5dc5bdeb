// C interface: element types, and views of memory that the caller has.
#pragma once

#include "conclave/c/base.h"

#if defined(__cplusplus)
extern "C" {
#endif

// Element types. Those of fewer than 8 bits fill bytes from the lowest bits on.
typedef int32_t conclave_dtype;
enum {
  CONCLAVE_DTYPE_BOOL = 1,  // a byte, 0 or 1
  CONCLAVE_DTYPE_U8 = 2,
  CONCLAVE_DTYPE_I8 = 3,
  CONCLAVE_DTYPE_U16 = 4,
  CONCLAVE_DTYPE_I16 = 5,
  CONCLAVE_DTYPE_U32 = 6,
  CONCLAVE_DTYPE_I32 = 7,
  CONCLAVE_DTYPE_U64 = 8,
  CONCLAVE_DTYPE_I64 = 9,
  CONCLAVE_DTYPE_F16 = 10,
  CONCLAVE_DTYPE_BF16 = 11,
  CONCLAVE_DTYPE_F32 = 12,
  CONCLAVE_DTYPE_F64 = 13,
  CONCLAVE_DTYPE_C64 = 14,
  CONCLAVE_DTYPE_F8E4M3 = 15,
  CONCLAVE_DTYPE_F8E5M2 = 16,
  CONCLAVE_DTYPE_F8E8M0 = 17,
  CONCLAVE_DTYPE_F8E4M3FNUZ = 18,
  CONCLAVE_DTYPE_F8E5M2FNUZ = 19,
  CONCLAVE_DTYPE_F4 = 20,  // e2m1
  CONCLAVE_DTYPE_F6E2M3 = 21,
  CONCLAVE_DTYPE_F6E3M2 = 22,
  CONCLAVE_DTYPE_I4 = 23,       // code c, of 0 to 15, is c - 8
  CONCLAVE_DTYPE_NF4 = 24,      // the 16 values of bitsandbytes' "nf4"
  CONCLAVE_DTYPE_BNB_FP4 = 25,  // the 16 values of bitsandbytes' "fp4"
  CONCLAVE_DTYPE_IQ4 = 26,      // the 16 whole numbers of ggml's IQ4_NL and IQ4_XS
  CONCLAVE_DTYPE_U4 = 27,       // code c, of 0 to 15, is c
  CONCLAVE_DTYPE_I6 = 28,       // in descriptions of layers only: no tensor has it
  CONCLAVE_DTYPE_U2 = 29        // likewise
};
// Bits of one element: 16 for CONCLAVE_DTYPE_BF16. CONCLAVE_ERROR_DTYPE for a number that is no
// type.
CONCLAVE_C_API conclave_status conclave_dtype_bits(conclave_dtype dtype,
                                                   int64_t* bits) CONCLAVE_C_NOTHROW;
// "BF16", as safetensors spells it; "unknown" for a number that is no type. Lives as long as the
// process.
CONCLAVE_C_API const char* conclave_dtype_name(conclave_dtype dtype) CONCLAVE_C_NOTHROW;

enum { CONCLAVE_MAX_RANK = 8 };

// A view of the caller's memory, which is never freed here. It is written only where a comment
// says so. Elements lie row by row; the last axis is dense. `data` is aligned to the element and
// may be NULL only where the shape has no elements.
typedef struct conclave_tensor {
  size_t struct_size;
  void* data;
  conclave_dtype dtype;
  int32_t rank;                      // 0 to CONCLAVE_MAX_RANK
  int64_t shape[CONCLAVE_MAX_RANK];  // the first `rank` are read
  int64_t row_stride;  // elements from a row to the next, for rank 2 only; 0: rows are dense
} conclave_tensor;

// A tensor with a name; this struct never grows.
typedef struct conclave_named_tensor {
  const char* name;
  const conclave_tensor* tensor;
} conclave_named_tensor;

// The memory that pointers of a source lie in.
typedef int32_t conclave_memory;
enum {
  CONCLAVE_MEMORY_HOST = 0,
  CONCLAVE_MEMORY_DEVICE = 1  // that of the context's device
};

#if defined(__cplusplus)
}
#endif
