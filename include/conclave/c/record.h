// C interface: recorded routing. The experts and weights of every token are kept in rings while
// layers run, written as safetensors, and given back to forwards of any batch.
#pragma once

#include "conclave/c/spec.h"

#if defined(__cplusplus)
extern "C" {
#endif

// Names a token across batches and programs; this struct never grows.
typedef struct conclave_token_key {
  int64_t sequence;
  int64_t position;
} conclave_token_key;

typedef int32_t conclave_when_full;
enum {
  CONCLAVE_WHEN_FULL_DROP_OLDEST = 0,  // overwrites, and counts what it overwrites
  CONCLAVE_WHEN_FULL_DROP_NEWEST = 1,  // keeps what it has, and counts what it does not take
  CONCLAVE_WHEN_FULL_ERROR = 2  // CONCLAVE_ERROR_STATE before anything of the call is recorded
};

// Rings of fixed size in memory of the host, one for each layer. Safe to use from several threads.
typedef struct conclave_recorder conclave_recorder;

typedef struct conclave_recorder_options {
  size_t struct_size;
  int64_t capacity;  // tokens of each layer, up to 2^40, booked at once; 0: 65536
  conclave_when_full when_full;
  int32_t reserved;        // 0
  const char* model;       // that files name, or NULL
  const char* model_type;  // likewise
} conclave_recorder_options;
// A recorder of layers by their numbers in the model, 0 to 65535, with the spec of each:
// layers[num_layers] and specs[num_layers]. `options` may be NULL. CONCLAVE_ERROR_INVALID_ARGUMENT,
// _OUT_OF_MEMORY.
CONCLAVE_C_API conclave_status conclave_recorder_create(const int64_t* layers,
                                                        const conclave_spec* const* specs,
                                                        size_t num_layers,
                                                        const conclave_recorder_options* options,
                                                        conclave_recorder** out) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API void conclave_recorder_destroy(conclave_recorder* recorder) CONCLAVE_C_NOTHROW;

// Adds T tokens of a layer: ids [T, K] i32 or i64 and weights [T, K] f32, as forwards capture them;
// rows may be apart. `tokens` [T] names them; NULL with num_tokens 0: they are numbered on, as
// sequence 0. All or nothing. CONCLAVE_ERROR_INVALID_ARGUMENT for a layer that is not recorded,
// _SHAPE, _DTYPE, _STRIDE, _EXPERT_ID; _STATE where it is full and should not drop.
CONCLAVE_C_API conclave_status conclave_recorder_record(conclave_recorder* recorder, int64_t layer,
                                                        const conclave_tensor* topk_ids,
                                                        const conclave_tensor* topk_weights,
                                                        const conclave_token_key* tokens,
                                                        size_t num_tokens) CONCLAVE_C_NOTHROW;
// The tokens that a layer was given, and those of them that are gone; either may be NULL.
CONCLAVE_C_API conclave_status conclave_recorder_counts(const conclave_recorder* recorder,
                                                        int64_t layer, int64_t* recorded,
                                                        int64_t* dropped) CONCLAVE_C_NOTHROW;
// The file appears when it is whole, in the place of one that has its name.
// CONCLAVE_ERROR_FILE_WRITE, also where a folder, a device, a pipe or a socket has it.
CONCLAVE_C_API conclave_status conclave_recorder_write(const conclave_recorder* recorder,
                                                       const char* path) CONCLAVE_C_NOTHROW;
// Forgets all rows and counts.
CONCLAVE_C_API conclave_status conclave_recorder_clear(conclave_recorder* recorder)
    CONCLAVE_C_NOTHROW;

// Recorded rows by token. Given to forward as topk_ids and topk_weights they have the bits of the
// forward that was recorded. Immutable.
typedef struct conclave_replay conclave_replay;

// Reads a file that was written so. CONCLAVE_ERROR of 200 to 599 naming what in it is wrong.
CONCLAVE_C_API conclave_status conclave_replay_open(const char* path,
                                                    conclave_replay** out) CONCLAVE_C_NOTHROW;
// Takes what a recorder has now.
CONCLAVE_C_API conclave_status conclave_replay_from_recorder(
    const conclave_recorder* recorder, conclave_replay** out) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API void conclave_replay_destroy(conclave_replay* replay) CONCLAVE_C_NOTHROW;

// Texts live as long as the replay.
typedef struct conclave_replay_info {
  size_t struct_size;
  size_t num_layers;
  const char* model;
  const char* model_type;
} conclave_replay_info;
CONCLAVE_C_API conclave_status conclave_replay_get_info(
    const conclave_replay* replay, conclave_replay_info* info) CONCLAVE_C_NOTHROW;
typedef struct conclave_replay_layer {
  size_t struct_size;
  int64_t layer;      // its number in the model
  int64_t num_slots;  // K
  int64_t num_ids;    // ids lie below it, or are -1
  int64_t num_tokens;
  int64_t dropped_tokens;
  uint64_t spec_hash;  // 0: not known
} conclave_replay_layer;
// The layer at `position`, below num_layers, ascending. CONCLAVE_ERROR_LAYER_NOT_FOUND.
CONCLAVE_C_API conclave_status conclave_replay_get_layer(
    const conclave_replay* replay, size_t position, conclave_replay_layer* info) CONCLAVE_C_NOTHROW;
// Writes the rows of `tokens` [T] to ids [T, K] i32 and weights [T, K] f32, of which each may be
// NULL; rows may be apart, the two do not overlap. CONCLAVE_ERROR_INVALID_ARGUMENT, before anything
// is written, for a layer or a token that was not recorded; _SHAPE, _DTYPE, _STRIDE, _MISALIGNED,
// _OVERLAP.
CONCLAVE_C_API conclave_status
conclave_replay_find(const conclave_replay* replay, int64_t layer, const conclave_token_key* tokens,
                     size_t num_tokens, const conclave_tensor* topk_ids,
                     const conclave_tensor* topk_weights) CONCLAVE_C_NOTHROW;
// A JSON object of how two differ, by layer and token, with at most `most_examples` tokens; member
// "equal" is true where all bits are the same. Free it with conclave_text_free.
// CONCLAVE_ERROR_SHAPE for a layer with other numbers of slots, _INVALID_ARGUMENT for a negative
// number of tokens.
CONCLAVE_C_API conclave_status conclave_replay_compare_json(const conclave_replay* first,
                                                            const conclave_replay* second,
                                                            int64_t most_examples,
                                                            char** json) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif
