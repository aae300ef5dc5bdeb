// C interface: routing on its own, for engines with expert kernels of their own.
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
} conclave_route_args;
// Ids lie in [0, E + Z). CONCLAVE_ERROR_SHAPE, _DTYPE, _STRIDE, _NULL_POINTER naming the argument.
CONCLAVE_C_API conclave_status conclave_router_route(
    const conclave_router* router, const conclave_route_args* args) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif
