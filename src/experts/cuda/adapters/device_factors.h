// Adapters in the memory of a GPU, and what kernels of experts are given of them. No CUDA header.
#pragma once

#include "core/device_flow.h"

#include "conclave/dtype.h"

#include <cstdint>

namespace conclave::inline v0::experts {

// Ranks of a product's halves and columns of A are filled up with zeros to this many, so that
// kernels read 16 bytes at a time.
inline constexpr int64_t kFactorLanes = 8;

// The factors of one product of one expert: gate and up are two halves, up alone and down are one,
// given twice. terms = scale * A x; a half adds B's row times its own terms to a sum.
struct DeviceFactors {
  const void* a = nullptr;            // [terms, columns of A]
  const void* b[2] = {};              // [rows, rank]
  int32_t rank[2] = {};               // multiples of kFactorLanes; 0: this half has no factors
  int32_t first[2] = {};              // the first term of each half
  int32_t terms = 0;                  // 0: the product has no factors
  int32_t first_of_second_scale = 0;  // terms from here on have the second scale
  float scale[2] = {1, 1};
  bool is_bf16 = false;  // elements of a and b; else float32
};

struct DeviceExpertFactors {
  DeviceFactors gate_up;
  DeviceFactors down;
};

// An epilogue reads this for one row, and so finds its factors in one step.
struct alignas(16) RowFactors {
  const void* b[2] = {};
  int16_t rank[2] = {};  // 0: nothing is added
  int16_t first[2] = {};
  int32_t is_bf16 = 0;
  int32_t unused = 0;
};

// The adapters of a call's tokens, in device memory.
struct DeviceAdapters {
  // [adapters]: the experts of each, by local expert.
  const DeviceExpertFactors* const* adapters = nullptr;
  // [tokens] 1 plus the place of each token's adapter, 0 for none; null: `mark` for all.
  const int32_t* marks = nullptr;
  int32_t mark = 0;
  int32_t most_terms = 0;       // the most that a product has
  int32_t slots_per_token = 1;  // how the grouping numbers slots
};

// Sorted rows of one product with their terms, [max_rows] and [max_rows, stride] float32.
struct AdapterTerms {
  RowFactors* rows = nullptr;
  float* terms = nullptr;
  int64_t stride = 0;
};

// The most terms of a row of gate and up, for matrices of at most this rank.
constexpr int64_t most_adapter_terms(int64_t max_rank) {
  return 2 * ((max_rank + kFactorLanes - 1) / kFactorLanes * kFactorLanes);
}

// A multiplies these: rows before they are quantised or ordered.
struct TermSource {
  const void* rows = nullptr;
  DType dtype = DType::kBF16;
  int64_t stride = 0;  // elements
  int64_t columns = 0;
  bool is_sorted = false;          // row r of the grouping; else the row of its token
  const float* weights = nullptr;  // per slot: they multiply terms; null: all 1
};

}  // namespace conclave::inline v0::experts
