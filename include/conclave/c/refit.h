// C interface: new weights for a layer that serves, as a transaction. Forwards see the old weights
// or the new ones, never a mixture; what fails leaves the old ones. docs/refit.md has more on each.
#pragma once

#include "conclave/c/layer.h"

#if defined(__cplusplus)
extern "C" {
#endif

// The weights that change; both lists empty: all. `tensors` alone: these of all experts; `experts`
// alone: everything of these routed experts; both: of the routed tensors those of these experts, of
// other tensors all. Names are those of conclave_source_from_tensors, and those that errors say:
// "gate_up", "down_scale", "router". Tensors that are packed together change together: gate and up
// of an expert with their scales, zeros and biases, down with its own.
typedef struct conclave_refit_scope {
  size_t struct_size;
  const int32_t* experts;  // [experts_count]
  size_t experts_count;
  const char* const* tensors;  // [tensors_count]
  size_t tensors_count;
} conclave_refit_scope;

typedef int32_t conclave_refit_mode;
enum {
  CONCLAVE_REFIT_MODE_STAGED = 0,       // packed beside the old ones, memory handed over
  CONCLAVE_REFIT_MODE_STAGED_COPY = 1,  // packed beside too, then copied: addresses stay
  CONCLAVE_REFIT_MODE_IN_PLACE = 2      // packed over the old ones: forward is
                                        // CONCLAVE_ERROR_STATE from the first stage to commit
};
enum {
  // The memory that a staged refit has packed into or replaced serves the next one of all experts.
  CONCLAVE_REFIT_KEEPS_MEMORY = 1,
  // Other ranks hear nothing where conclave_refit_create is refused: for a rank whose other threads
  // run forwards then. It calls conclave_layer_withdraw_refit itself, where the others commit.
  CONCLAVE_REFIT_SILENT_REFUSAL = 2
};

typedef struct conclave_refit_options {
  size_t struct_size;
  const conclave_refit_scope* scope;  // NULL: all
  // The number that the layer has after commit, larger than the one it has
  // (conclave_layer_stats::refit_epoch); 0: one more. Ranks name the same.
  uint64_t epoch;
  conclave_refit_mode mode;
  uint32_t flags;  // CONCLAVE_REFIT_*
  // The threads that pack, beside those of the context: 0 and 1: the calling thread alone; unused
  // with an executor. `executor` is copied; what it points to outlives the refit.
  int32_t num_threads;
  int32_t reserved;  // 0
  const conclave_executor* executor;
  // The ranks of conclave_refit_stage_broadcast, if they are others than those that share the
  // layer: they hear of a rank that gives up before it has come to its first one. The refit holds
  // it. NULL: none, or those of the first broadcast.
  conclave_communicator* communicator;
} conclave_refit_options;

// One transaction of a layer and of those that share its weights. Holds what it needs of the layer,
// which may be ended before. One thread at a time may use it, beside forwards of others. Until it
// is ended, committed, rolled back or withdrawn, another refit, reload, update_placement and
// migrations are CONCLAVE_ERROR_STATE. Afterwards stage and commit of this one are, and rolling
// back does nothing.
typedef struct conclave_refit conclave_refit;

// `options` may be NULL. CONCLAVE_ERROR_INVALID_ARGUMENT naming the expert, the tensor, or an epoch
// that is not larger; _UNSUPPORTED with the reason: experts that are read in place, of which
// a part or on CUDA any are named; _STATE if a migration or refit is under way, or if the layer has
// no complete weights and the scope is not all of them; _OUT_OF_MEMORY. Where ranks share the
// layer, whoever is refused calls conclave_layer_withdraw_refit_because with its error first, and
// so waits for the others' commit, unless CONCLAVE_REFIT_SILENT_REFUSAL.
CONCLAVE_C_API conclave_status conclave_refit_create(conclave_layer* layer,
                                                     const conclave_refit_options* options,
                                                     conclave_refit** out) CONCLAVE_C_NOTHROW;
// Rolls back unless it is committed.
CONCLAVE_C_API void conclave_refit_destroy(conclave_refit* refit) CONCLAVE_C_NOTHROW;

// Reads and packs the whole scope, or `part` of it, so that weights may come in several pieces;
// what is staged again replaces what was. A source needs no more than what is named: for arrays of
// some experts see conclave_source_options::experts. Errors as of conclave_layer_create for a
// source, and CONCLAVE_ERROR_INVALID_ARGUMENT for a part outside of the scope. The transaction goes
// on then, and what failed may be staged again.
CONCLAVE_C_API conclave_status
conclave_refit_stage(conclave_refit* refit, const conclave_source* source,
                     const conclave_refit_scope* part) CONCLAVE_C_NOTHROW;
// The same for a layer of a checkpoint, by its index there.
CONCLAVE_C_API conclave_status conclave_refit_stage_from_checkpoint(
    conclave_refit* refit, const conclave_checkpoint* checkpoint, int64_t index,
    const conclave_refit_scope* part) CONCLAVE_C_NOTHROW;

// How the weights of one rank travel to the others.
typedef struct conclave_broadcast_options {
  size_t struct_size;
  int32_t root;  // the rank of the communicator that has them, the same on every rank
  // The memory in which a rank keeps what it receives, where CONCLAVE_BROADCAST_HAS_MEMORY; else
  // that of the context's device if the communicator carries it, or the host's.
  conclave_memory memory;
  const conclave_refit_scope* part;  // NULL: the refit's scope
  int64_t exchange_bytes;            // that go at a time, the same on every rank; 0: 64 MiB
  uint32_t flags;                    // CONCLAVE_BROADCAST_HAS_MEMORY
  uint32_t reserved;                 // 0
} conclave_broadcast_options;
enum { CONCLAVE_BROADCAST_HAS_MEMORY = 1 };

// Stages what the root has. Collective over `communicator`, on which nothing else is under way and
// which the refit holds: `source` is the root's, others give NULL; `options` may be NULL. From the
// first call on these ranks take part in commit and withdraw as those that share the layer do, so
// that all of them have the new weights or none. Errors of conclave_refit_stage;
// CONCLAVE_ERROR_COMM_MISMATCH with the rank and its reason where another one has no weights to
// send or no use for them, after which the transaction goes on, and where one has withdrawn, after
// which this one is over too; _COMM_* as of any collective; _UNSUPPORTED where the layer reads
// experts in their source's memory. Whoever is refused here tells the others as
// conclave_refit_refuse_broadcast does, but for a refit or a communicator of NULL.
CONCLAVE_C_API conclave_status conclave_refit_stage_broadcast(
    conclave_refit* refit, conclave_communicator* communicator, const conclave_source* source,
    const conclave_broadcast_options* options) CONCLAVE_C_NOTHROW;
// In its place, for a rank that has no weights to send or no use for them: the others' is
// CONCLAVE_ERROR_COMM_MISMATCH with this rank as its peer, and the reason, of which some 240 bytes
// arrive. All transactions go on. Waits for the others, no longer than the communicator's deadline.
// `reason` may be NULL. A rank without a refit calls conclave_layer_withdraw_refit_because.
CONCLAVE_C_API conclave_status
conclave_refit_refuse_broadcast(conclave_refit* refit, conclave_communicator* communicator,
                                const char* reason) CONCLAVE_C_NOTHROW;

// Sets *staged to 1 once all of the scope is staged.
CONCLAVE_C_API conclave_status conclave_refit_is_staged(const conclave_refit* refit,
                                                        int32_t* staged) CONCLAVE_C_NOTHROW;

// Makes the staged weights the layer's between two forwards. Collective over the layer's ranks, as
// a forward is: all of them go to the new epoch or none does, and a rank whose stage failed calls
// it too. CONCLAVE_ERROR_STATE naming a part that is not staged, what a stage met, _COMM_*; the
// transaction goes on then.
CONCLAVE_C_API conclave_status conclave_refit_commit(conclave_refit* refit) CONCLAVE_C_NOTHROW;
// Ends it with the old weights; in place, once some are overwritten, with none: forward is
// CONCLAVE_ERROR_STATE until all are reloaded or refitted. Other ranks are not told.
CONCLAVE_C_API conclave_status conclave_refit_rollback(conclave_refit* refit) CONCLAVE_C_NOTHROW;
// The same, and tells the other ranks: their commit is CONCLAVE_ERROR_COMM_MISMATCH with this rank
// as its peer. Waits for them as a commit does; one that does not come is no error here.
CONCLAVE_C_API conclave_status conclave_refit_withdraw(conclave_refit* refit) CONCLAVE_C_NOTHROW;
// The same for a rank that has no transaction where the others have one: it was refused, or did not
// find its weights. One of its own is left as it is.
CONCLAVE_C_API conclave_status conclave_layer_withdraw_refit(const conclave_layer* layer)
    CONCLAVE_C_NOTHROW;
// Both with the reason, which the others' errors have too; some 240 bytes of it arrive. NULL: none.
CONCLAVE_C_API conclave_status
conclave_refit_withdraw_because(conclave_refit* refit, const char* reason) CONCLAVE_C_NOTHROW;
// `communicator` is that of the others' conclave_refit_options, or NULL.
CONCLAVE_C_API conclave_status conclave_layer_withdraw_refit_because(
    const conclave_layer* layer, conclave_communicator* communicator,
    const char* reason) CONCLAVE_C_NOTHROW;

// A hash of the weights that this rank holds: equal for layers of one plan with equal weights,
// whatever way these came and wherever experts have moved. Reads all of it, beside forwards.
// That of another device differs. CONCLAVE_ERROR_STATE while experts are on their way or without
// complete weights.
CONCLAVE_C_API conclave_status
conclave_layer_content_hash(const conclave_layer* layer, uint64_t* content_hash) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif
