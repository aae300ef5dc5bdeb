// Small conversions between the caller's tensors and the rows that kernels read.
#pragma once

#include "conclave/dtype.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0 {

// Converts rows between f32, f16 and bf16, rounding to nearest even.
struct ConvertRows {
  const void* rows = nullptr;  // [num_rows, row_stride]
  DType dtype = DType::kF32;
  int64_t row_stride = 0;  // elements
  int64_t num_rows = 0;
  int64_t columns = 0;
  void* out = nullptr;
  DType out_dtype = DType::kBF16;
  int64_t out_stride = 0;
};
// Enqueues one launch, which overlaps with its predecessor; enqueues nothing for no rows.
void convert_rows(const ConvertRows& args, CUstream_st* stream);

// Turns a call's live-token count into that of its chunk of `count` tokens from `begin` on:
// *out = *live - begin, clamped to [0, count].
void chunk_live_tokens(const int64_t* live, int64_t begin, int64_t count, int64_t* out,
                       CUstream_st* stream);

// Works as convert_rows, but makes one copy of a row per weight: row t * top_k + s is row t times
// weights[t * top_k + s], in float32. num_rows counts the copies.
void weigh_rows(const ConvertRows& args, const float* weights, int64_t top_k, CUstream_st* stream);

// rows[t] = rows[t] / sqrt(mean(rows[t]^2) + epsilon) * weight, in place.
void rms_norm_rows(float* rows, int64_t num_rows, int64_t columns, const float* weight,
                   double epsilon, CUstream_st* stream);

// The softmax over two logits per token: routed[t] = c0, shared[t] = c1.
void mix_factors(const float* logits, int64_t num_tokens, float* routed, float* shared,
                 CUstream_st* stream);

// physical[t, s] is the replica of expert ids[t, s] that serves token first_token + t, as in
// placement/replicas.cc; a negative id stays. expert_load [E], if given, counts the ids of live
// tokens.
struct ChooseReplicas {
  const int32_t* ids = nullptr;  // [T, k]
  int64_t num_tokens = 0;
  const int64_t* live_tokens = nullptr;  // or null
  int32_t top_k = 0;
  int64_t first_token = 0;
  const int32_t* first = nullptr;     // [E + 1]
  const int32_t* replicas = nullptr;  // [P]
  int32_t* physical = nullptr;        // [T, k]
  int64_t* expert_load = nullptr;
};
void choose_replicas(const ChooseReplicas& args, CUstream_st* stream);

// values[i] = 1 / (1 + exp(-values[i]))
void sigmoid_in_place(float* values, int64_t count, CUstream_st* stream);

}  // namespace conclave::inline v0
