// C interface: what a layer is, as values.
#pragma once

#include "conclave/c/tensor.h"

#if defined(__cplusplus)
extern "C" {
#endif

// Describes a layer: sizes, router, activation, shared experts, types of weights. Immutable.
typedef struct conclave_spec conclave_spec;

// Makes a spec of a JSON object with the members of the C++ MoeSpec (conclave/spec.h), structs as
// objects, enumerators as words, types as safetensors spells them; docs/c-interface.md lists all.
// Members that are left out have their default:
//   {"num_experts": 64, "top_k": 6, "hidden_size": 2048, "intermediate_size": 1408,
//    "weight_dtype": "BF16", "router": {"score": "sigmoid", "scale": 2.5}, "has_gate": false}
// Specs of published models come from conclave_checkpoint_spec and conclave_feed_spec.
// CONCLAVE_ERROR_JSON_* for the text; _INVALID_ARGUMENT naming a member that does not exist or has
// a value out of range; _UNKNOWN_NAME for a word, _DTYPE for a type.
CONCLAVE_C_API conclave_status conclave_spec_from_json(const char* json,
                                                       conclave_spec** out) CONCLAVE_C_NOTHROW;
// Every member of the spec, as conclave_spec_from_json reads them. Free it with conclave_text_free.
CONCLAVE_C_API conclave_status conclave_spec_to_json(const conclave_spec* spec,
                                                     char** json) CONCLAVE_C_NOTHROW;

typedef int32_t conclave_rows;
enum {
  CONCLAVE_ROWS_PLAIN = 1,  // unchanged, whether or not the spec quantises them
  CONCLAVE_ROWS_INT8 = 2    // int8 in groups of 32 columns, where they had been left unchanged
};
// The same layer with other rows beside its weights. CONCLAVE_ERROR_INVALID_ARGUMENT for weights
// that int8 rows do not go with.
CONCLAVE_C_API conclave_status conclave_spec_with_rows(const conclave_spec* spec,
                                                       conclave_rows rows,
                                                       conclave_spec** out) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API void conclave_spec_destroy(conclave_spec* spec) CONCLAVE_C_NOTHROW;

// The sizes that calls need: hidden and out are [T, hidden_size], logits [T, num_logits], ids and
// weights [T, num_slots].
typedef struct conclave_spec_info {
  size_t struct_size;
  int64_t num_experts;
  int64_t top_k;
  int64_t hidden_size;
  int64_t intermediate_size;
  int64_t num_logits;
  int64_t num_slots;
  int64_t num_zero_experts;
  int64_t parameters;         // weight elements of the layer, over all ranks; 0 without its sizes
  int64_t active_parameters;  // those that one token uses
  conclave_dtype weight_dtype;
  conclave_dtype row_dtype;  // the type of hidden rows in a model with these weights
  int32_t has_gate;          // 1: the layer makes its own logits
  int32_t has_shared;        // 1: it has shared experts
} conclave_spec_info;
// CONCLAVE_ERROR_INVALID_ARGUMENT naming a size that no layer has.
CONCLAVE_C_API conclave_status conclave_spec_get_info(const conclave_spec* spec,
                                                      conclave_spec_info* info) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif
