// C interface: models that are written anew with their experts in another form.
#pragma once

#include "conclave/c/context.h"

#if defined(__cplusplus)
extern "C" {
#endif

typedef int32_t conclave_model_container;
enum {
  // GGUF if the destination ends in ".gguf", else the only one that has the format, else that of
  // the source.
  CONCLAVE_MODEL_CONTAINER_AUTO = 0,
  CONCLAVE_MODEL_CONTAINER_SAFETENSORS = 1,  // a model directory, as Hugging Face has it
  CONCLAVE_MODEL_CONTAINER_GGUF = 2          // a directory that holds a GGUF file, or its parts
};
typedef int32_t conclave_existing_model;
enum {
  CONCLAVE_EXISTING_MODEL_REFUSE = 0,
  // Takes the place of a model or an empty directory, and of an unfinished conversion.
  CONCLAVE_EXISTING_MODEL_REPLACE = 1
};
typedef int32_t conclave_scale_rule;
enum {
  CONCLAVE_SCALE_RULE_AMAX = 0,   // the largest magnitude over the largest code
  CONCLAVE_SCALE_RULE_SEARCH = 1  // the scale of least squared error among clipped ranges
};

// Linear layers of experts whose name matches are left as they are, or get a format of their own.
typedef struct conclave_keep_rule {
  size_t struct_size;
  const char* pattern;  // "*" stands for any text, "?" for one character
  // NULL and "source": they keep their tensors. Else "bf16", "f16" or "f32"; in GGUF files any.
  const char* format;
} conclave_keep_rule;

// How far a conversion is. Lives during the call.
typedef struct conclave_convert_progress {
  size_t struct_size;  // the library's: it may be less than this program knows
  const char* phase;   // "converting", then "measuring"
  int64_t done;        // bytes that the phase has done
  int64_t total;
  const char* reason;  // NULL; may be set to a text that says why the conversion ends, copied
} conclave_convert_progress;

enum {
  // A conversion that fails or is ended leaves what it has written in DESTINATION.partial, from
  // which the next one with the same arguments goes on. Without it nothing is left, but what an
  // earlier conversion had left there.
  CONCLAVE_CONVERT_KEEP_UNFINISHED = 1,
  // Outputs of layers are not compared, which takes most of the time of a small model.
  CONCLAVE_CONVERT_NO_COMPARISON = 2
};
typedef struct conclave_convert_options {
  size_t struct_size;
  conclave_model_container container;  // the result's
  conclave_existing_model existing;    // where something has the destination's name
  conclave_scale_rule scales;
  uint32_t flags;         // CONCLAVE_CONVERT_*
  const int64_t* layers;  // [layers_count], by index; none: all MoE layers
  size_t layers_count;
  const conclave_keep_rule* keep;  // [keep_count] of one struct_size; the first that matches counts
  size_t keep_count;
  uint64_t shard_bytes;  // largest shard, unless one linear layer is larger; 0: 5 GB
  int64_t tokens;        // random rows on which outputs of layers are compared; 0: 32
  uint64_t seed;         // these rows are drawn from it
  // Told on the calling thread how far the conversion is, piece by piece, or NULL. A status other
  // than CONCLAVE_OK, such as CONCLAVE_ERROR_CANCELLED, ends it and is that of the call, as does a
  // number that is no status, which becomes CONCLAVE_ERROR_CANCELLED.
  conclave_status (*progress)(void* user, conclave_convert_progress* progress);
  void* progress_user;
} conclave_convert_options;

// A conversion that is done, and its report.
typedef struct conclave_conversion conclave_conversion;

// Reads the model at `source`, as conclave_checkpoint_open takes it, and writes it into the
// directory `destination` with its routed and shared experts in `format`, a name of
// conclave_convert_formats_json, with options behind a colon: "gptq-int4:group=64,asym". Other
// tensors and files are copied. Works with the threads of the context, whose device does not
// matter; memory is a few rows for each thread, and where outputs are compared an expert in
// float64. The destination has its name only when all of it is there. `options` may be NULL; `out`
// too.
//
// CONCLAVE_ERROR_UNKNOWN_NAME and _INVALID_ARGUMENT name the argument that means nothing here;
// _UNSUPPORTED names the tensor that no format of the result can say; _LAYER_NOT_FOUND; errors of
// conclave_checkpoint_open for the source; _FILE_WRITE for a destination that exists, is the source
// or holds it, cannot be made, or has too little room; _FILE_CHANGED if the source changes
// meanwhile; _TENSOR_VALUE names the tensor of a weight that is not finite; what `progress`
// returns.
CONCLAVE_C_API conclave_status conclave_convert_model(const conclave_context* context,
                                                      const char* source, const char* destination,
                                                      const char* format,
                                                      const conclave_convert_options* options,
                                                      conclave_conversion** out) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API void conclave_conversion_destroy(conclave_conversion* conversion) CONCLAVE_C_NOTHROW;

// Texts live as long as the conversion.
typedef struct conclave_conversion_info {
  size_t struct_size;
  const char* model;         // the result, as conclave_checkpoint_open takes it
  const char* model_type;    // the source's: "qwen3_moe"
  const char* incomplete;    // why the result has MoE layers alone; "": it is a whole model
  const char* no_tokenizer;  // why a whole model in another container has none; "": it has one
  uint64_t bytes_before;     // in all tensors
  uint64_t bytes_after;
  size_t shards;
  size_t shards_kept;  // finished by an earlier conversion
  size_t num_matrices;
  size_t num_layers;      // whose outputs were compared
  double relative_error;  // all converted weights have it, in L2
  double worst_error;     // the worst token's, in the output of any layer, relative and in L2
} conclave_conversion_info;
CONCLAVE_C_API conclave_status conclave_conversion_get_info(
    const conclave_conversion* conversion, conclave_conversion_info* info) CONCLAVE_C_NOTHROW;
// The text of conversion.json in the result, with every matrix and layer. Free it with
// conclave_text_free.
CONCLAVE_C_API conclave_status conclave_conversion_json(const conclave_conversion* conversion,
                                                        char** json) CONCLAVE_C_NOTHROW;

// A JSON list of the formats that models are converted to: [{"name": "int4-group128", "container":
// "safetensors", "options": ""}], with what may follow a name behind a colon. Free it with
// conclave_text_free.
CONCLAVE_C_API conclave_status conclave_convert_formats_json(char** json) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif
