// Sums and maxima, element by element, in the order in which they are called: by rank, so that
// every run has the same bits.
#pragma once

#include <conclave/c.h>
#include <string.h>

// The first row is copied, later ones are added to it or compared.
#define REDUCE_ROWS_OF(type)                      \
  do {                                            \
    type* const sums = (type*)to;                 \
    const type* const values = (const type*)from; \
    size_t i;                                     \
    for (i = 0; i < bytes / sizeof(type); ++i) {  \
      if (op == CONCLAVE_REDUCE_OP_SUM) {         \
        sums[i] += values[i];                     \
      } else if (sums[i] < values[i]) {           \
        sums[i] = values[i];                      \
      }                                           \
    }                                             \
  } while (0)

static inline void reduce_rows(void* to, const void* from, size_t bytes, conclave_dtype dtype,
                               conclave_reduce_op op, int is_first) {
  if (bytes == 0) return;
  if (is_first) {
    memcpy(to, from, bytes);
    return;
  }
  switch (dtype) {
    case CONCLAVE_DTYPE_F32:
      REDUCE_ROWS_OF(float);
      break;
    case CONCLAVE_DTYPE_F64:
      REDUCE_ROWS_OF(double);
      break;
    case CONCLAVE_DTYPE_I32:
      REDUCE_ROWS_OF(int32_t);
      break;
    default:
      REDUCE_ROWS_OF(int64_t);  // nothing else is asked of a table without supports_reduction
  }
}
