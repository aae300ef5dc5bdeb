// Examples of several calls share this: views of arrays, numbers that are the same in every run,
// and the end of a program where something is not as it should be.
#pragma once

#include <conclave/c.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// A real program hands the status up and ends its objects; these end at the first error.
static inline void require(conclave_status status, const char* step) {
  if (status == CONCLAVE_OK) return;
  fprintf(stderr, "%s: %s (%d): %s\n", step, conclave_status_name(status), (int)status,
          conclave_last_error_message());
  exit(1);
}

static inline void expect(int condition, const char* text) {
  if (condition) return;
  fprintf(stderr, "not so: %s\n", text);
  exit(1);
}

// The call before has to fail with this status; the text says what a user would read.
static inline void expect_error(conclave_status status, conclave_status expected) {
  if (status != expected) {
    fprintf(stderr, "%s in the place of %s: %s\n", conclave_status_name(status),
            conclave_status_name(expected), conclave_last_error_message());
    exit(1);
  }
  printf("as it should, %s: %s\n", conclave_status_name(status), conclave_last_error_message());
}

static inline conclave_tensor tensor3(void* data, conclave_dtype dtype, int64_t a, int64_t b,
                                      int64_t c) {
  conclave_tensor view = {0};
  view.struct_size = sizeof view;
  view.data = data;
  view.dtype = dtype;
  view.rank = 3;
  view.shape[0] = a;
  view.shape[1] = b;
  view.shape[2] = c;
  return view;
}

static inline conclave_tensor matrix(void* data, conclave_dtype dtype, int64_t rows, int64_t cols) {
  conclave_tensor view = tensor3(data, dtype, rows, cols, 0);
  view.rank = 2;
  return view;
}

static inline conclave_tensor vector(void* data, conclave_dtype dtype, int64_t count) {
  conclave_tensor view = tensor3(data, dtype, count, 0, 0);
  view.rank = 1;
  return view;
}

static inline void* allocate(int64_t count, size_t bytes) {
  void* const memory = calloc((size_t)count, bytes);
  expect(memory != NULL, "there is memory");
  return memory;
}

// Numbers from -size to size, in another order for each seed.
static inline void fill(float* values, int64_t count, float size, unsigned seed) {
  int64_t i;
  for (i = 0; i < count; ++i)
    values[i] = size * sinf((float)(i + 1) * (1.0F + 0.37F * (float)seed));
}

static inline int same_bits(const float* first, const float* second, int64_t count) {
  return memcmp(first, second, (size_t)count * sizeof *first) == 0;
}
