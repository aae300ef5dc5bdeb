// C interface: models in files, as lists of MoE layers.
#pragma once

#include "conclave/c/source.h"

#if defined(__cplusplus)
extern "C" {
#endif

// A model directory of Hugging Face or a GGUF file, opened. Immutable.
typedef struct conclave_checkpoint conclave_checkpoint;

typedef int32_t conclave_file_access;
enum {
  CONCLAVE_FILE_ACCESS_AUTO = 0,  // reads
  CONCLAVE_FILE_ACCESS_MAP = 1,   // maps files, which nobody may then truncate or rewrite
  CONCLAVE_FILE_ACCESS_READ = 2
};
typedef int32_t conclave_expert_set;
enum { CONCLAVE_EXPERT_SET_TEXT = 0, CONCLAVE_EXPERT_SET_VISION = 1 };
enum {
  CONCLAVE_CHECKPOINT_EXTRA_LAYERS = 1,    // also lists layers of multi-token prediction
  CONCLAVE_CHECKPOINT_VERIFY_MANIFEST = 2  // checks data against the manifest while it is read
};
typedef struct conclave_checkpoint_options {
  size_t struct_size;
  conclave_file_access access;
  conclave_expert_set experts;  // where a layer has one for text and one for images
  uint32_t flags;               // CONCLAVE_CHECKPOINT_*
  uint32_t reserved;            // 0
} conclave_checkpoint_options;

// Reads configuration, index and headers, and no tensor. `options` may be NULL. CONCLAVE_ERROR of
// 200 to 599 naming the file, and what in it is wrong.
CONCLAVE_C_API conclave_status
conclave_checkpoint_open(const char* path, const conclave_checkpoint_options* options,
                         conclave_checkpoint** out) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API void conclave_checkpoint_destroy(conclave_checkpoint* checkpoint) CONCLAVE_C_NOTHROW;

// Texts live as long as the checkpoint.
typedef struct conclave_checkpoint_info {
  size_t struct_size;
  size_t num_layers;  // MoE layers
  int64_t num_hidden_layers;
  uint64_t bytes;            // all tensors take them
  uint64_t parameters;       // elements of all tensors
  const char* model_type;    // "qwen3_moe"
  const char* architecture;  // the table that reads it
} conclave_checkpoint_info;
CONCLAVE_C_API conclave_status conclave_checkpoint_get_info(
    const conclave_checkpoint* checkpoint, conclave_checkpoint_info* info) CONCLAVE_C_NOTHROW;

// A MoE layer of the model. Texts live as long as the checkpoint.
typedef struct conclave_layer_info {
  size_t struct_size;
  int64_t index;       // its number in the model, by which other calls name it
  uint64_t bytes;      // its tensors take them in the files
  const char* prefix;  // "model.layers.0.mlp."
  const char* layout;  // "per_expert"
  const char* reason;  // why it cannot run; "" if it can
} conclave_layer_info;
// The layer at `position`, below num_layers, ascending by index. CONCLAVE_ERROR_LAYER_NOT_FOUND.
CONCLAVE_C_API conclave_status
conclave_checkpoint_get_layer(const conclave_checkpoint* checkpoint, size_t position,
                              conclave_layer_info* info) CONCLAVE_C_NOTHROW;

// Makes the spec of the layer with this index, its weights included.
// CONCLAVE_ERROR_LAYER_NOT_FOUND.
CONCLAVE_C_API conclave_status conclave_checkpoint_spec(const conclave_checkpoint* checkpoint,
                                                        int64_t index,
                                                        conclave_spec** out) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API conclave_status conclave_checkpoint_source(const conclave_checkpoint* checkpoint,
                                                          int64_t index,
                                                          conclave_source** out) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif
