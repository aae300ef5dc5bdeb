// C interface: experts that move by themselves as the load of layers changes.
#pragma once

#include "conclave/c/placement.h"

#if defined(__cplusplus)
extern "C" {
#endif

// Counts rows of layers in a window of steps, now and then adds up the counts of all ranks, and
// sends experts where conclave_slots_balance says. One on each rank, with the same options and the
// same layers in the same order. A step is a forward of each layer. Holds what it needs of the
// layers, which may be ended before. The thread that calls the layers uses it.
typedef struct conclave_balancer conclave_balancer;

enum {
  CONCLAVE_BALANCER_LOG = 1,  // writes to the context's log how even the ranks' rows are
  // Moves all experts between two forwards, in the step that finds it is time, and not beside
  // forwards, layer by layer.
  CONCLAVE_BALANCER_BETWEEN_FORWARDS = 2
};

// The C++ BalancerOptions (conclave/balancer.h) has more on each.
typedef struct conclave_balancer_options {
  size_t struct_size;
  // Connects the ranks of the layers' communicator in the same order, and serves nothing else.
  conclave_communicator* communicator;
  const char* rule;                   // as of conclave_balance_options; NULL: "hierarchical"
  int32_t num_nodes;                  // 0: 1
  uint32_t flags;                     // CONCLAVE_BALANCER_*
  int64_t window_size;                // steps whose rows count, the last ones; 0: 1000
  int64_t step_interval;              // steps from one rebalance to the next; 0: 3000
  int64_t log_balancedness_interval;  // steps from one line of the log to the next; 0: 1
  double least_gain;                  // as of conclave_balance_options; 0: 0.01
  double processor_share;             // as of conclave_migration_options; 0: 0.05
  size_t piece_bytes;                 // likewise; 0: 256 KiB
} conclave_balancer_options;

// `layers` [num_layers]. Collective over the layers' communicators, as making them is.
// CONCLAVE_ERROR_INVALID_ARGUMENT naming the field, _UNKNOWN_NAME for a rule, _UNSUPPORTED for a
// layer with CONCLAVE_REDUCE_PARTIAL, _SIZE_OVERFLOW and _OUT_OF_MEMORY for a window, _COMM_*.
CONCLAVE_C_API conclave_status conclave_balancer_create(const conclave_context* context,
                                                        conclave_layer* const* layers,
                                                        size_t num_layers,
                                                        const conclave_balancer_options* options,
                                                        conclave_balancer** out) CONCLAVE_C_NOTHROW;
// Ends what is under way, as conclave_migration_destroy does.
CONCLAVE_C_API void conclave_balancer_destroy(conclave_balancer* balancer) CONCLAVE_C_NOTHROW;

// Sets *load and *num_experts to where rows of the forwards of this step are added, for
// conclave_forward_args::expert_load: `layer` is its position in `layers`. Valid until the next
// step. CONCLAVE_ERROR_INVALID_ARGUMENT.
CONCLAVE_C_API conclave_status conclave_balancer_load(conclave_balancer* balancer, size_t layer,
                                                      int64_t** load,
                                                      size_t* num_experts) CONCLAVE_C_NOTHROW;
// After the forwards of a step, on every rank. Waits for nothing but with
// CONCLAVE_BALANCER_BETWEEN_FORWARDS. The error that ended a migration, if one did: the layers go
// on in the placement that they are in, and the balancer does nothing more.
CONCLAVE_C_API conclave_status conclave_balancer_step(conclave_balancer* balancer)
    CONCLAVE_C_NOTHROW;
// Begins a rebalance with the next step, unless one is under way.
CONCLAVE_C_API conclave_status conclave_balancer_rebalance(conclave_balancer* balancer)
    CONCLAVE_C_NOTHROW;

typedef struct conclave_balancer_status {
  size_t struct_size;
  int64_t steps;
  int64_t rebalances;     // begun
  int64_t experts_moved;  // in all layers, to and from any rank
  double balancedness;    // over all layers and this rank's rows of the last step; 1 is perfect
  int32_t is_moving;      // 1: a rebalance is under way
  int32_t reserved;       // 0
} conclave_balancer_status;
CONCLAVE_C_API conclave_status conclave_balancer_get_status(
    const conclave_balancer* balancer, conclave_balancer_status* status) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif
