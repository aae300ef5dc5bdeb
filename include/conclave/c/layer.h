// C interface: one fused Mixture-of-Experts layer. Everything is decided when it is made; forward
// runs the plan straight through, without allocation.
#pragma once

#include "conclave/c/checkpoint.h"
#include "conclave/c/context.h"

#if defined(__cplusplus)
extern "C" {
#endif

// A layer, planned and packed. It holds its context, and its source where it reads weights in
// place. Nothing of it changes but by reloads, refits, adapters and experts that move, each of
// which says what may run beside it. Forwards at the same time need a workspace each, and on CUDA a
// stream each. Ending it does not wait for work that a stream still holds.
typedef struct conclave_layer conclave_layer;
// Scratch memory of a forward. One may serve several layers that are used one after another.
typedef struct conclave_workspace conclave_workspace;

typedef int32_t conclave_id_policy;
enum {
  CONCLAVE_ID_POLICY_STRICT = 0,  // an id that is no expert is CONCLAVE_ERROR_EXPERT_ID
  CONCLAVE_ID_POLICY_SKIP = 1     // it contributes nothing; -1 never does
};
typedef int32_t conclave_ep_transport;
enum { CONCLAVE_EP_TRANSPORT_VARIABLE = 0, CONCLAVE_EP_TRANSPORT_FIXED_SLOTS = 1 };
typedef int32_t conclave_ep_combine;
enum {
  CONCLAVE_EP_COMBINE_UNREDUCED = 0,  // results do not depend on the number of ranks
  CONCLAVE_EP_COMBINE_REDUCED_PER_RANK = 1,
  CONCLAVE_EP_COMBINE_ROUNDED_PER_RANK = 2  // to 16 bits; on CUDA only
};
typedef int32_t conclave_chunk_order;
enum {
  CONCLAVE_CHUNK_ORDER_IN_TURN = 0,
  CONCLAVE_CHUNK_ORDER_BY_TWOS = 1,
  CONCLAVE_CHUNK_ORDER_MICRO_BATCHES = 2
};
typedef int32_t conclave_determinism;
enum {
  CONCLAVE_DETERMINISM_REPEATABLE = 0,
  CONCLAVE_DETERMINISM_BATCH_INVARIANT = 1,
  CONCLAVE_DETERMINISM_UNORDERED = 2
};
typedef int32_t conclave_weight_use;
enum {
  CONCLAVE_WEIGHT_USE_PACKED = 0,
  CONCLAVE_WEIGHT_USE_IN_PLACE = 1  // read where the source has them; on "cpu" only
};

// The C++ LayerOptions (conclave/layer.h) has more on each.
typedef struct conclave_layer_options {
  size_t struct_size;
  int64_t max_tokens;  // tokens planned for, 0: 4096; forward takes more, in equal chunks
  const char* kernel;  // row of the kernel table to force, "cpu.avx2"; NULL: the first that fits
  const char* arithmetic;  // "f32_fma", ...; NULL: by the table of CPUs
  const char* tuning;      // path of a tuning table for CUDA, or NULL
  conclave_id_policy id_policy;
  conclave_ep_transport transport;
  conclave_ep_combine ep_combine;
  conclave_chunk_order chunk_order;
  conclave_determinism determinism;
  conclave_weight_use weights;
  int32_t spare_experts;
  int32_t reserved;            // 0
  int64_t max_adapter_rank;    // adapters may have it, up to 512; 0: none can be added
  int64_t micro_batch_tokens;  // calls of as many are cut in two; 0: as the plan finds it worth
} conclave_layer_options;

typedef int32_t conclave_placement;
enum {
  CONCLAVE_PLACEMENT_STRATEGY_LINEAR = 0,
  CONCLAVE_PLACEMENT_STRATEGY_ROUND_ROBIN = 1,
  CONCLAVE_PLACEMENT_STRATEGY_CUSTOM = 2  // rank_of names the rank
};
typedef int32_t conclave_reduce;
enum {
  CONCLAVE_REDUCE_FULL = 0,    // out is complete on every rank
  CONCLAVE_REDUCE_PARTIAL = 1  // out is this rank's part, and the caller adds up
};
// The split of a layer over ranks: whole experts (ep), slices of each (tp), or both.
typedef struct conclave_parallel {
  size_t struct_size;
  int32_t ep_size;  // 0: 1
  int32_t ep_rank;
  int32_t tp_size;  // 0: 1
  int32_t tp_rank;
  conclave_placement placement;
  conclave_reduce reduce;
  int32_t num_redundant_experts;  // R
  int32_t reserved;               // 0
  const int32_t* rank_of;         // [rank_of_count]: the rank of each expert, E + R of them
  size_t rank_of_count;
  const int32_t* replica_of;  // [replica_of_count]: the expert of each replica, R or none
  size_t replica_of_count;
} conclave_parallel;

// Validates, plans, and packs this rank's weights. Collective over the context's communicators
// that `parallel` needs. `options` and `parallel` may be NULL. CONCLAVE_ERROR_INVALID_ARGUMENT,
// _UNKNOWN_NAME, _UNSUPPORTED with the reasons, _TENSOR_MISSING, _TENSOR_SHAPE, _TENSOR_DTYPE,
// _OUT_OF_MEMORY, _COMM_*.
CONCLAVE_C_API conclave_status conclave_layer_create(const conclave_context* context,
                                                     const conclave_spec* spec,
                                                     const conclave_source* source,
                                                     const conclave_layer_options* options,
                                                     const conclave_parallel* parallel,
                                                     conclave_layer** out) CONCLAVE_C_NOTHROW;
// The same for a layer of a checkpoint, by its index there.
CONCLAVE_C_API conclave_status conclave_layer_create_from_checkpoint(
    const conclave_context* context, const conclave_checkpoint* checkpoint, int64_t index,
    const conclave_layer_options* options, const conclave_parallel* parallel,
    conclave_layer** out) CONCLAVE_C_NOTHROW;
// A layer for calls of up to `max_tokens` tokens on the same packed weights, without a copy. They
// share reload and counters. Collective as create.
CONCLAVE_C_API conclave_status conclave_layer_with_max_tokens(
    const conclave_layer* layer, int64_t max_tokens, conclave_layer** out) CONCLAVE_C_NOTHROW;
// The same layer on other ranks: those that are left after a failure, or more. `context` has their
// communicators, `parallel` says how they split it. Experts that this rank lacks are read from
// `source`, which may be NULL where the ranks have all. Collective over the new ranks.
CONCLAVE_C_API conclave_status conclave_layer_on_ranks(const conclave_layer* layer,
                                                       const conclave_context* context,
                                                       const conclave_parallel* parallel,
                                                       const conclave_source* source,
                                                       conclave_layer** out) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API void conclave_layer_destroy(conclave_layer* layer) CONCLAVE_C_NOTHROW;

// Nanoseconds; each forward on "cpu" adds its time.
typedef struct conclave_timings {
  size_t struct_size;
  int64_t route_ns;
  int64_t dispatch_ns;
  int64_t experts_ns;
  int64_t shared_ns;
  int64_t combine_ns;
  int64_t total_ns;
} conclave_timings;

// Letters: T tokens, H hidden, L num_logits, K num_slots, E experts (conclave_spec_info). hidden
// and out are needed; all others may be NULL. Routing is router_logits, or topk_ids with
// topk_weights, or neither where the layer has a gate; topk_ids alone replays choices. hidden, out
// and weights are f32, f16 or bf16, each by itself. out may be hidden itself; nothing else that is
// written may overlap anything. On "cpu" all memory is that of the host. On CUDA all of it, with
// num_tokens and expert_load, is that of the context's device and lives until the stream has
// passed: forward enqueues and returns.
typedef struct conclave_forward_args {
  size_t struct_size;
  const conclave_tensor* hidden;           // [T, H]
  const conclave_tensor* out;              // [T, H], written
  const conclave_tensor* router_logits;    // [T, L]
  const conclave_tensor* topk_ids;         // [T, K] i32 or i64
  const conclave_tensor* topk_weights;     // [T, K]
  const conclave_tensor* router_input;     // [T, H]; the gate reads it instead of hidden
  const conclave_tensor* residual_input;   // [T, H]; the residual MLP reads it instead of hidden
  const conclave_tensor* token_ids;        // [T] i32 or i64, for routers that look them up
  const conclave_tensor* padding_mask;     // [T] bool; 0: the token is padding, its output is 0
  const conclave_tensor* shared_out;       // [T, H], written: the shared part, which out then lacks
  const conclave_tensor* captured_logits;  // [T, L] f32, written
  const conclave_tensor* captured_ids;     // [T, K] i32, written; -1: skipped
  const conclave_tensor* captured_weights;  // [T, K] f32, written
  const int64_t* num_tokens;                // only the first *num_tokens rows count
  int64_t* expert_load;                     // [E]; this call's rows per expert are added
  size_t expert_load_count;                 // E, or 0 without expert_load
  conclave_workspace* workspace;            // NULL: the layer's own, one forward at a time
  void* stream;                             // a cudaStream_t, needed on CUDA; unused on "cpu"
  conclave_timings* timings;                // "cpu" only
  // Limits of this call: fewer experts for each token, experts that are not to be chosen (on CUDA
  // [E + Z] may be of the host), and how many all tokens together may use.
  int64_t top_k;                          // slots of a token that are filled, 1 to k; 0: all
  const conclave_tensor* banned_experts;  // [E + Z] or [T, E + Z] bool; 1: banned
  int64_t expert_budget;                  // k to E; 0: any number
  const conclave_tensor* adapter_ids;     // [T] i32 or i64 (conclave/c/adapter.h); -1: none
  const int32_t* adapter;                 // the same for all tokens, in place of adapter_ids
  // The rows of `hidden` of every expert-parallel rank in this call, by ep_rank, the same list on
  // all of them, in host memory; all ranks give one or none does. With it a layer on CUDA asks
  // nobody; NULL: ranks ask each other.
  const int64_t* rank_tokens;  // [rank_tokens_count]
  size_t rank_tokens_count;    // ep_size, or 0 without rank_tokens
} conclave_forward_args;
// Any T from 0 works. Collective over the layer's ranks. Errors of arguments come before anything
// is written, and name the argument; after CONCLAVE_ERROR_COMM_* out is incomplete.
CONCLAVE_C_API conclave_status conclave_layer_forward(
    const conclave_layer* layer, const conclave_forward_args* args) CONCLAVE_C_NOTHROW;

// Memory of the context's device for forwards of a layer of any context of that device. `stream`,
// if not NULL, is where it is used. CONCLAVE_ERROR_OUT_OF_MEMORY, _DEVICE.
CONCLAVE_C_API conclave_status
conclave_workspace_create(const conclave_context* context, size_t bytes, void* stream,
                          conclave_workspace** out) CONCLAVE_C_NOTHROW;
// The same over memory that the caller keeps: of the host, 64-byte aligned, or of the device,
// 256-byte aligned.
CONCLAVE_C_API conclave_status
conclave_workspace_borrow(const conclave_context* context, void* memory, size_t bytes, void* stream,
                          conclave_workspace** out) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API void conclave_workspace_destroy(conclave_workspace* workspace) CONCLAVE_C_NOTHROW;
// The bytes that serve calls of up to `tokens` tokens; -1: of any number.
CONCLAVE_C_API conclave_status conclave_layer_workspace_bytes(const conclave_layer* layer,
                                                              int64_t tokens,
                                                              size_t* bytes) CONCLAVE_C_NOTHROW;

typedef int32_t conclave_reload_mode;
enum {
  CONCLAVE_RELOAD_MODE_STAGED = 0,   // packs a second copy, then swaps
  CONCLAVE_RELOAD_MODE_IN_PLACE = 1  // overwrites; if a read fails midway, forward is
                                     // CONCLAVE_ERROR_STATE until a reload completes
};
// Loads weights of the same shapes and types, on this rank alone. Not while a forward runs.
CONCLAVE_C_API conclave_status conclave_layer_reload(conclave_layer* layer,
                                                     const conclave_source* source,
                                                     conclave_reload_mode mode) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API conclave_status
conclave_layer_reload_from_checkpoint(conclave_layer* layer, const conclave_checkpoint* checkpoint,
                                      int64_t index, conclave_reload_mode mode) CONCLAVE_C_NOTHROW;

// Counters since the layer was made, of this rank and all layers that share its weights, and sizes.
typedef struct conclave_layer_stats {
  size_t struct_size;
  int64_t forwards;
  int64_t tokens;
  int64_t skipped_ids;  // ids other than -1 that were dropped
  int64_t tokens_without_finite_logit;
  int64_t max_tokens;         // as planned
  int64_t num_local_experts;  // on this rank
  size_t workspace_bytes;
  size_t packed_bytes;
  size_t in_place_bytes;
  uint64_t placement_epoch;  // placements that the layer has had, the first being 0
  int64_t num_adapters;
  size_t adapter_bytes;  // on this rank
  uint64_t refit_epoch;  // the last refit that was committed has it, 0 before any
  // Rows of the gate that have NaN now, whose experts are chosen only where nothing else can be.
  int64_t gate_rows_with_nan;
} conclave_layer_stats;
// CONCLAVE_ERROR_DEVICE if work that was enqueued earlier made a device fail.
CONCLAVE_C_API conclave_status conclave_layer_get_stats(
    const conclave_layer* layer, conclave_layer_stats* stats) CONCLAVE_C_NOTHROW;
// Makes the spec that the layer was made of.
CONCLAVE_C_API conclave_status conclave_layer_spec(const conclave_layer* layer,
                                                   conclave_spec** out) CONCLAVE_C_NOTHROW;

// The plan, as the text that `conclave explain` prints or as JSON with the members of the C++ Plan:
// each alternative with the reason why it was taken or not. Free them with conclave_text_free.
CONCLAVE_C_API conclave_status conclave_layer_explain(const conclave_layer* layer,
                                                      char** text) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API conclave_status conclave_layer_plan_json(const conclave_layer* layer,
                                                        char** json) CONCLAVE_C_NOTHROW;
// The same for a layer that could be made, without its weights. `options`, `parallel` and `source`,
// which is asked only what it has in memory, may be NULL. A plan that cannot be is no error: its
// rows say why.
CONCLAVE_C_API conclave_status conclave_plan_explain(const conclave_context* context,
                                                     const conclave_spec* spec,
                                                     const conclave_layer_options* options,
                                                     const conclave_parallel* parallel,
                                                     const conclave_source* source,
                                                     char** text) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API conclave_status conclave_plan_json(const conclave_context* context,
                                                  const conclave_spec* spec,
                                                  const conclave_layer_options* options,
                                                  const conclave_parallel* parallel,
                                                  const conclave_source* source,
                                                  char** json) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif
