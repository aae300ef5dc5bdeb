// C interface: recorded routing of layers on CUDA. Rings in the device's memory, which forwards
// fill without anybody waiting, also in graphs; what is read out is a replay as any other.
#pragma once

#include "conclave/c/context.h"
#include "conclave/c/record.h"

#if defined(__cplusplus)
extern "C" {
#endif

// Rings of fixed size, one for each layer. Holds its context. Rows of one layer come in the order
// of a stream, or of streams that wait for each other; different layers do not meet. Whatever reads
// waits for all work of the device and must not run while a stream is captured. Graphs that record
// must not be replayed once it is ended.
typedef struct conclave_device_recorder conclave_device_recorder;

// Works as conclave_recorder_create. CONCLAVE_ERROR_UNSUPPORTED for a context on "cpu",
// _INVALID_ARGUMENT, _OUT_OF_MEMORY, _DEVICE.
CONCLAVE_C_API conclave_status conclave_device_recorder_create(
    const conclave_context* context, const int64_t* layers, const conclave_spec* const* specs,
    size_t num_layers, const conclave_recorder_options* options,
    conclave_device_recorder** out) CONCLAVE_C_NOTHROW;
// Waits for the device.
CONCLAVE_C_API void conclave_device_recorder_destroy(conclave_device_recorder* recorder)
    CONCLAVE_C_NOTHROW;

// Rows of one forward, as it captures them, in the device's memory, which live until the stream has
// passed.
typedef struct conclave_device_routing_rows {
  size_t struct_size;
  int64_t layer;
  const conclave_tensor* topk_ids;      // [T, K] i32 or i64; rows may be apart
  const conclave_tensor* topk_weights;  // [T, K] f32; likewise
  // [T, 2] i64, the sequence and position of each; NULL: they are numbered on, as sequence 0.
  const conclave_tensor* tokens;
  const int64_t* num_tokens;  // only the first *num_tokens rows count; NULL: all
  void* stream;               // a cudaStream_t
} conclave_device_routing_rows;
// Enqueues one launch and allocates nothing; a captured one records at each replay.
// CONCLAVE_ERROR_INVALID_ARGUMENT for a layer that is not recorded, _SHAPE, _DTYPE, _STRIDE,
// _NULL_POINTER, _MISALIGNED, _DEVICE, before anything is enqueued. What the device alone sees, an
// id that the layer has not or a call that does not fit with CONCLAVE_WHEN_FULL_ERROR, is the error
// of whatever reads the layer next, until clear.
CONCLAVE_C_API conclave_status
conclave_device_recorder_record(conclave_device_recorder* recorder,
                                const conclave_device_routing_rows* rows) CONCLAVE_C_NOTHROW;

// These are those of conclave_recorder, and wait. CONCLAVE_ERROR_INVALID_ARGUMENT for a layer that
// is not recorded; _EXPERT_ID and _STATE for what record could not see; _DEVICE.
CONCLAVE_C_API conclave_status
conclave_device_recorder_counts(const conclave_device_recorder* recorder, int64_t layer,
                                int64_t* recorded, int64_t* dropped) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API conclave_status conclave_device_recorder_write(
    const conclave_device_recorder* recorder, const char* path) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API conclave_status conclave_device_recorder_clear(conclave_device_recorder* recorder)
    CONCLAVE_C_NOTHROW;
CONCLAVE_C_API conclave_status conclave_replay_from_device_recorder(
    const conclave_device_recorder* recorder, conclave_replay** out) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif
