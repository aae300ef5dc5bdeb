// The steps of routers other than "topk" on the device, with ids and weights as the host's routers
// make them. dispatch/cuda/sanitize_ids.h handles padding, captures and grouping.
#pragma once

#include "conclave/dtype.h"
#include "conclave/spec.h"

#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::routing {

// Limits: columns of a simulated router's draw; choices plus sinks of one softmax.
inline constexpr int64_t kMaxSimulatedExperts = 4096;
inline constexpr int64_t kMaxSinkTerms = 32;

struct DeviceRuleArgs {
  const void* logits = nullptr;  // [T, logits_stride] kF32, kBF16 or kF16
  DType logits_dtype = DType::kF32;
  int64_t logits_stride = 0;
  int64_t num_tokens = 0;
  int64_t first_token = 0;               // number of the first token in its call
  const int64_t* live_tokens = nullptr;  // device, or null; later rows are not counted
  const bool* padding_mask = nullptr;    // [T], or null; false: not counted
  const int32_t* given_ids = nullptr;    // [T, k]: recorded choices to be weighed only, or null
  const void* token_ids = nullptr;       // [T] kI32 or kI64, for "hash"
  DType token_ids_dtype = DType::kI32;
  const int32_t* hash_table = nullptr;              // [vocab, k]
  const int32_t* replay_ids = nullptr;              // for SimulatedDistribution::kReplay
  const float* replay_weights = nullptr;            // or null
  const float* selection_bias = nullptr;            // [E], or null
  const float* global_scale = nullptr;              // [1], or null
  int32_t* ids = nullptr;                           // [T, k] out
  float* weights = nullptr;                         // [T, k] out
  float* shared_weights = nullptr;                  // [T, S] out, for "sink_softmax"
  uint64_t* tokens_without_finite_logit = nullptr;  // device counters to add to
  uint64_t* skipped_ids = nullptr;
};

// One launch each. "hash": writes only the ids, by token id; a token id that is no row of the table
// chooses nothing and counts as skipped.
void device_look_up(const MoeSpec& spec, const DeviceRuleArgs& args, CUstream_st* stream);
// "sparse_mixer"
void device_sparse_mixer(const MoeSpec& spec, const DeviceRuleArgs& args, CUstream_st* stream);
// "sink_softmax": reads `ids` and writes their weights and those of the sinks.
void device_weigh_with_sinks(const MoeSpec& spec, const DeviceRuleArgs& args, CUstream_st* stream);
// "simulated"
void device_simulate(const MoeSpec& spec, const DeviceRuleArgs& args, CUstream_st* stream);

// The choosing half of "sink_softmax" as a spec for device_route.
MoeSpec sink_choice_spec(const MoeSpec& spec);

// Weights of SharedMode::kFusedSlots: those of the caller's slots k to k + S - 1, or slot_weight; 0
// if the slot names another expert than its own.
struct DeviceFusedSlots {
  const void* given_ids = nullptr;  // [T, ids_stride] of k + S columns kI32 or kI64, or null
  DType ids_dtype = DType::kI32;
  int64_t ids_stride = 0;
  const void* given_weights = nullptr;  // [T, weights_stride], or null
  DType weights_dtype = DType::kF32;
  int64_t weights_stride = 0;
  int64_t num_tokens = 0;
  const int64_t* live_tokens = nullptr;
  const bool* padding_mask = nullptr;
  int32_t top_k = 0;
  int32_t num_experts = 0;
  int32_t num_shared = 0;
  float slot_weight = 1;
  float* shared_weights = nullptr;  // [T, S] out
  int32_t* captured_ids = nullptr;  // columns k to k + S - 1 of [T, stride], or null
  int64_t captured_ids_stride = 0;
  float* captured_weights = nullptr;
  int64_t captured_weights_stride = 0;
  uint64_t* skipped_ids = nullptr;
};
void device_fused_slots(const DeviceFusedSlots& args, CUstream_st* stream);

}  // namespace conclave::inline v0::routing
