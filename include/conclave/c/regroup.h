// C interface: a layer goes to other ranks, more or fewer, as a planned act. Ranks that leave hand
// over what they have, ranks that join get it from those that have it, and no file is read.
// docs/parallel.md has more on each; after a failure see conclave_survivors.
#pragma once

#include "conclave/c/placement.h"

#if defined(__cplusplus)
extern "C" {
#endif

// Equal on all ranks but for `parallel` and `source`.
typedef struct conclave_regroup_options {
  size_t struct_size;
  // Joins everyone concerned, in any order: ranks that stay, that leave and that join. Serves
  // nothing else meanwhile. With tensor-parallel ranks, those with the same slice. Needed.
  conclave_communicator* everyone;
  // The split afterwards; NULL: the ranks of the new context have the experts as
  // conclave_slots_spread deals them. All give one or none does; ranks that leave give none.
  const conclave_parallel* parallel;
  // Experts that none of the ranks has are read from it where they are to lie; NULL: there are
  // none.
  const conclave_source* source;
  double processor_share;  // part of a core's time for copies on each rank; 0: 1, without a rest
  size_t piece_bytes;      // one message, 4 KiB to 1 GiB; 0: 256 KiB
} conclave_regroup_options;

// Three calls that meet: each rank of `everyone` makes the one that says what it does, at the same
// time. Either all of them succeed and every rank of the new group has its layer, or all fail and
// nothing has changed; only where a rank is lost at the very end may others have succeeded, and
// both layers are whole then too. The layer before stays as it is and serves meanwhile and
// afterwards, over its own communicator. Experts that a rank keeps are shared, not copied. Adapters
// stay with the layer before, counters begin anew.
// CONCLAVE_ERROR_INVALID_ARGUMENT naming the field; _UNSUPPORTED with the reason: a layer on CUDA,
// weights read in place, CONCLAVE_REDUCE_PARTIAL; _STATE while experts are on their way;
// _TENSOR_MISSING with an expert that nobody has; _OUT_OF_MEMORY; what the source meets;
// _COMM_MISMATCH where ranks disagree, _COMM_ABORTED naming a rank that could not do its part,
// _COMM_PEER_LOST and _COMM_TIMEOUT. After those `everyone` and the new communicators are of no
// more use.

// Stays: the layer on the new ranks, whose communicators `context` has; one without any where this
// rank is left alone.
CONCLAVE_C_API conclave_status conclave_layer_regroup(const conclave_layer* layer,
                                                      const conclave_context* context,
                                                      const conclave_regroup_options* options,
                                                      conclave_layer** out) CONCLAVE_C_NOTHROW;
// Leaves: this rank's experts go to those that stay. The layer may be ended afterwards.
CONCLAVE_C_API conclave_status conclave_layer_hand_over(
    const conclave_layer* layer, const conclave_regroup_options* options) CONCLAVE_C_NOTHROW;
// Joins with nothing. `spec` and `layer_options` are those that the layer was created with
// (conclave_layer_spec).
CONCLAVE_C_API conclave_status conclave_layer_join(const conclave_context* context,
                                                   const conclave_spec* spec,
                                                   const conclave_layer_options* layer_options,
                                                   const conclave_regroup_options* options,
                                                   conclave_layer** out) CONCLAVE_C_NOTHROW;

// The places of a layer on other ranks: rank r of them was rank old_ranks[r], of [num_ranks], or -1
// joins with nothing. Every expert keeps as many replicas as it has, at most one on a rank, and one
// that has no place gets one; experts stay where they are as far as ranks hold equally many, or one
// more. Equal arguments give equal places. CONCLAVE_ERROR_INVALID_ARGUMENT naming the field.
CONCLAVE_C_API conclave_status conclave_slots_spread(const conclave_slots* before,
                                                     const int32_t* old_ranks, size_t num_ranks,
                                                     conclave_slots** out) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif
