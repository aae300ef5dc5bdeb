// C interface: routing on its own, for engines with expert kernels of their own, and routers of an
// application's own.
#pragma once

#include "conclave/c/context.h"
#include "conclave/c/spec.h"

#if defined(__cplusplus)
extern "C" {
#endif

// The routing rule of a spec. Immutable; calls may run at the same time. Holds its context.
typedef struct conclave_router conclave_router;

// Reads of the spec what routing needs; sizes of matrices may be 0. CONCLAVE_ERROR_INVALID_ARGUMENT
// and _UNKNOWN_NAME name the field; _UNSUPPORTED with the reason.
CONCLAVE_C_API conclave_status conclave_router_create(const conclave_context* context,
                                                      const conclave_spec* spec,
                                                      conclave_router** out) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API void conclave_router_destroy(conclave_router* router) CONCLAVE_C_NOTHROW;

// Letters: T tokens, E experts, Z zero experts, k choices, S shared experts, L num_logits. On
// "cpu" all memory is that of the host; on CUDA of the context's device, until the stream has
// passed. NULL where the spec has no use for it.
typedef struct conclave_route_args {
  size_t struct_size;
  const conclave_tensor* logits;          // [T, L] f32, f16 or bf16; rows may be apart
  const conclave_tensor* topk_ids;        // [T, k] i32, dense, written
  const conclave_tensor* topk_weights;    // [T, k] f32, dense, written
  const conclave_tensor* shared_weights;  // [T, S] f32, dense, written
  const conclave_tensor* token_ids;       // [T] i32 or i64
  const conclave_tensor* selection_bias;  // [E + Z]
  const conclave_tensor* expert_scale;    // [E]
  const conclave_tensor* global_scale;    // [1]
  const conclave_named_tensor* tensors;   // tensors of the router's own, by name
  size_t num_tensors;
  void* stream;  // a cudaStream_t, needed on CUDA
  // Limits of this call, as conclave_forward_args has them; "cpu" only.
  int64_t top_k;
  const conclave_tensor* banned_experts;
  int64_t expert_budget;
} conclave_route_args;
// Ids lie in [0, E + Z); slots that limits leave empty have id -1. What is written overlaps nothing
// else. CONCLAVE_ERROR_SHAPE, _DTYPE, _STRIDE, _MISALIGNED, _OVERLAP, _NULL_POINTER naming the
// argument, before anything is written; _INVALID_ARGUMENT for limits that leave too few experts;
// what a router of the application's own returns.
CONCLAVE_C_API conclave_status conclave_router_route(
    const conclave_router* router, const conclave_route_args* args) CONCLAVE_C_NOTHROW;

// A call of a router of the application's own. Rows lie one behind another; pointers live during
// the call, and are NULL where the layer has no such thing. The function writes every element of
// what is written, and changes no other member but the last two.
typedef struct conclave_route_call {
  size_t struct_size;           // the library's: it may be less than this program knows
  int64_t num_tokens;           // T, at least 1
  int64_t top_k;                // k: the spec's, or fewer where the call asks for fewer
  int64_t num_experts;          // E
  int64_t num_zero_experts;     // Z
  int64_t num_logits;           // L
  int64_t num_shared;           // S with shared_weights, otherwise 0
  int64_t first_token;          // number of row 0 in the forward, which may be cut in chunks
  const float* logits;          // [T, L]; of banned experts -inf
  const int32_t* token_ids;     // [T]
  const int32_t* given_ids;     // [T, k]: weigh these instead of choosing; -1: none
  const float* selection_bias;  // [E + Z]
  const float* expert_scale;    // [E]
  const float* global_scale;    // [1]
  const uint8_t* banned;        // row t at banned + t * banned_stride, [E + Z]; 1: not to be chosen
  int64_t banned_stride;        // 0: one row for all tokens
  void* scratch;                // conclave_own_router::scratch_bytes, 64-byte aligned
  int32_t* topk_ids;            // [T, k], written: experts in [0, E + Z), or -1 for none
  float* topk_weights;          // [T, k], written
  float* shared_weights;        // [T, S], written, where shared.mode is "router_weight"
  int64_t
      tokens_without_finite_logit;  // 0; may be set to a number up to T, for conclave_layer_stats
  const char* reason;  // may be set to a text that says why it failed, and is copied at once
} conclave_route_call;

// A rule from logits to experts, by a function of C. `route` may run on several threads at the same
// time, within forwards: it does not wait for other calls of the library, and ends by returning.
// A status other than CONCLAVE_OK ends the forward with that status, and with
// CONCLAVE_ERROR_STATE for a number that is no status; outputs are then incomplete.
// CONCLAVE_ERROR_STATE as well where it leaves an element unwritten; an id that is no expert is
// treated by conclave_id_policy, and is CONCLAVE_ERROR_EXPERT_ID of conclave_router_route.
typedef struct conclave_own_router {
  size_t struct_size;
  const char* name;  // that router.name of specs says
  void* user;        // outlives the context and all that holds it
  conclave_status (*route)(void* user, conclave_route_call* call);
  // Called once, when nothing calls `route` any more, by the thread that ends the last object that
  // might; or NULL.
  void (*release)(void* user);
  size_t scratch_bytes;  // memory for each call of `route`, at most 2^30
} conclave_own_router;

// Makes a router usable by its name in specs of layers and routers of this context, those that are
// made later; a name of the library's own is then this router's in the context. On "cpu" only. May
// run while other threads use the context. CONCLAVE_ERROR_INVALID_ARGUMENT for a name that was
// added before; after any error nothing is kept, and `release` is not called.
CONCLAVE_C_API conclave_status conclave_context_add_router(
    conclave_context* context, const conclave_own_router* router) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif
