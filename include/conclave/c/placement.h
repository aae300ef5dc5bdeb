// C interface: which experts lie on which rank, and how they move there while a layer lives.
#pragma once

#include "conclave/c/layer.h"

#if defined(__cplusplus)
extern "C" {
#endif

// Places for experts, rank by rank, and the expert in each; several places may hold replicas of
// one. Immutable.
typedef struct conclave_slots conclave_slots;

// `logical_of` [num_slots] has the expert of each place; rank r holds the places from first_of[r]
// up to first_of[r + 1]. `first_of` [num_ranks + 1] begins with 0, never falls and ends with
// num_slots. CONCLAVE_ERROR_INVALID_ARGUMENT naming the element.
CONCLAVE_C_API conclave_status conclave_slots_create(int64_t num_experts, const int32_t* logical_of,
                                                     size_t num_slots, const int32_t* first_of,
                                                     size_t num_ranks,
                                                     conclave_slots** out) CONCLAVE_C_NOTHROW;
// Those that a layer of so many experts has with a split. CONCLAVE_ERROR_INVALID_ARGUMENT.
CONCLAVE_C_API conclave_status
conclave_slots_from_parallel(int64_t num_experts, const conclave_parallel* parallel,
                             conclave_slots** out) CONCLAVE_C_NOTHROW;
// Those that the layer has now.
CONCLAVE_C_API conclave_status conclave_layer_slots(const conclave_layer* layer,
                                                    conclave_slots** out) CONCLAVE_C_NOTHROW;

enum { CONCLAVE_BALANCE_SHARED_RANKS = 1 };  // replicas of an expert may lie on one rank

// The C++ BalanceRequest (conclave/balance.h) has more on each.
typedef struct conclave_balance_options {
  size_t struct_size;
  const char* rule;   // "hierarchical", "global", "surviving" or "steady"; NULL: "hierarchical"
  int32_t num_ranks;  // 0: 1
  int32_t num_redundant_experts;
  int32_t num_nodes;               // 0: 1; ranks are numbered node by node
  uint32_t flags;                  // CONCLAVE_BALANCE_*
  int64_t num_groups;              // 0: 1; router.num_groups
  const conclave_slots* previous;  // the places of now, where experts then stay; or NULL
  double least_gain;               // "steady" moves for no less of the busiest rank's load; 0: 0.01
} conclave_balance_options;
// Places for experts that had load[e] rows, [num_experts], of any window: the sums of
// conclave_forward_args::expert_load over ranks. Equal arguments give equal places on every rank.
// CONCLAVE_ERROR_INVALID_ARGUMENT naming the field.
CONCLAVE_C_API conclave_status conclave_slots_balance(const double* load, size_t num_experts,
                                                      const conclave_balance_options* options,
                                                      conclave_slots** out) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API void conclave_slots_destroy(conclave_slots* slots) CONCLAVE_C_NOTHROW;

// Arrays live as long as the slots.
typedef struct conclave_slots_info {
  size_t struct_size;
  int64_t num_experts;
  const int32_t* logical_of;  // [num_slots]
  size_t num_slots;
  const int32_t* first_of;  // [num_ranks + 1]
  size_t num_ranks;
} conclave_slots_info;
CONCLAVE_C_API conclave_status
conclave_slots_get_info(const conclave_slots* slots, conclave_slots_info* info) CONCLAVE_C_NOTHROW;
// The mean over ranks of the rows that each would have had, over the largest: 1 is perfect.
CONCLAVE_C_API conclave_status conclave_slots_balancedness(const conclave_slots* slots,
                                                           const double* load, size_t num_experts,
                                                           double* balancedness) CONCLAVE_C_NOTHROW;
// The experts that would travel from one to the other.
CONCLAVE_C_API conclave_status conclave_slots_moved(const conclave_slots* before,
                                                    const conclave_slots* after,
                                                    int64_t* moved) CONCLAVE_C_NOTHROW;

// `options` of a move may be NULL where no member is needed.
typedef struct conclave_migration_options {
  size_t struct_size;
  // Connects the ranks of the context's communicator in the same order, and serves nothing else
  // meanwhile. conclave_migration_create needs one of its own; otherwise NULL is the context's.
  conclave_communicator* communicator;
  // Experts are read from it where they are to lie, on another thread too; NULL: they are sent.
  // Given by every rank or by none.
  const conclave_source* source;
  double processor_share;  // part of a core's time for copies beside forwards; 0: 0.05
  size_t piece_bytes;      // one message, 4 KiB to 1 GiB; 0: 256 KiB
} conclave_migration_options;

// Moves experts to these places and returns when they are there. Between two forwards, on every
// rank with the same slots and options. A rank has at most as many experts as places: those of the
// first placement and all of conclave_layer_options::spare_experts but one. Layers that share
// weights share the placement. CONCLAVE_ERROR_INVALID_ARGUMENT naming the field; _UNSUPPORTED with
// the reason: experts read in place, or with adapters; _STATE while a migration is
// under way; _COMM_*. The layer then stays at the last placement that all ranks had reached.
CONCLAVE_C_API conclave_status
conclave_layer_update_placement(conclave_layer* layer, const conclave_slots* slots,
                                const conclave_migration_options* options) CONCLAVE_C_NOTHROW;

// Experts on their way, copied by a thread of its own while forwards go on; the next forward of all
// ranks uses those that have come. One at a time for the layers that share weights: until it is
// ended, others, update_placement and reload are CONCLAVE_ERROR_STATE. Holds what it needs of the
// layer, which may be ended before. One thread at a time may use it.
typedef struct conclave_migration conclave_migration;

// On every rank, with the same slots and options; waits for no rank. As
// conclave_layer_update_placement; _UNSUPPORTED also for CONCLAVE_REDUCE_PARTIAL and for a circle
// of experts without a spare place.
CONCLAVE_C_API conclave_status conclave_migration_create(
    conclave_layer* layer, const conclave_slots* slots, const conclave_migration_options* options,
    conclave_migration** out) CONCLAVE_C_NOTHROW;
// Ends it where it is; before it is done its communicator is aborted, so that peers need not wait.
CONCLAVE_C_API void conclave_migration_destroy(conclave_migration* migration) CONCLAVE_C_NOTHROW;

typedef struct conclave_migration_status {
  size_t struct_size;
  int32_t is_done;     // 1: every expert is where it should be, and forwards use it
  int32_t has_failed;  // 1: it will not go on; conclave_migration_check says why
  int64_t rounds;      // placements from the first to the last
  int64_t rounds_done;
  int64_t experts_moved;  // to and from any rank, so far
} conclave_migration_status;
CONCLAVE_C_API conclave_status conclave_migration_get_status(
    const conclave_migration* migration, conclave_migration_status* status) CONCLAVE_C_NOTHROW;
// The error that ended it, if one did: CONCLAVE_ERROR_COMM_*, or what the source met. Waits for
// nothing.
CONCLAVE_C_API conclave_status conclave_migration_check(const conclave_migration* migration)
    CONCLAVE_C_NOTHROW;
// Waits until it is done. Collective over the layer's communicators, as a forward without tokens.
CONCLAVE_C_API conclave_status conclave_migration_finish(conclave_migration* migration)
    CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif
