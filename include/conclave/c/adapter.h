// C interface: low-rank adapters (LoRA) of a layer's experts, several at once, chosen token by
// token. A matrix W [out, in] with factors a [r, in] and b [out, r] computes W x + scale b (a x).
#pragma once

#include "conclave/c/layer.h"

#if defined(__cplusplus)
extern "C" {
#endif

typedef int32_t conclave_weight_mlp;
enum { CONCLAVE_WEIGHT_MLP_ROUTED = 0, CONCLAVE_WEIGHT_MLP_SHARED = 1 };
typedef int32_t conclave_weight_matrix;
enum {
  CONCLAVE_WEIGHT_MATRIX_GATE = 0,
  CONCLAVE_WEIGHT_MATRIX_UP = 1,
  CONCLAVE_WEIGHT_MATRIX_DOWN = 2
};

// The factors of one matrix of one expert: f32, f16 or bf16 in memory of the host. Gate and up may
// share the memory of `a`, which is then held and multiplied once.
typedef struct conclave_lora_factors {
  size_t struct_size;
  conclave_weight_mlp mlp;
  conclave_weight_matrix matrix;
  int64_t expert;            // its number, among shared experts too
  const conclave_tensor* a;  // [r, in]; rows may be apart
  const conclave_tensor* b;  // [out, r]; rows may be apart
  double scale;              // lora_alpha / r; not 0, which is "not given"
  const char* name;          // for error texts, or NULL
} conclave_lora_factors;

// An adapter of one layer. Matrices that are not listed are not adapted.
typedef struct conclave_lora_adapter {
  size_t struct_size;
  const char* name;                      // for error texts and lists, or NULL
  const conclave_lora_factors* factors;  // [num_factors], all of one struct_size
  size_t num_factors;
} conclave_lora_adapter;

// Adds an adapter, whose values are checked and copied, and sets *id to its number: 0, 1, ...,
// never used twice. The layer needs conclave_layer_options::max_adapter_rank. Concurrent with
// forwards and with itself: a forward that is under way does not see it. Every rank adds and
// removes the same adapters in the same order and between the same forwards, or forward is
// CONCLAVE_ERROR_COMM_MISMATCH. Layers that share weights share adapters, reload keeps them.
// CONCLAVE_ERROR_SHAPE, _DTYPE, _STRIDE, _MISALIGNED, _INVALID_ARGUMENT, _TENSOR_DUPLICATE,
// _TENSOR_VALUE for a value that is not finite, each naming the factor; _STATE for a layer without
// room or whose experts are on their way; _UNSUPPORTED with the reason.
CONCLAVE_C_API conclave_status conclave_layer_add_adapter(conclave_layer* layer,
                                                          const conclave_lora_adapter* adapter,
                                                          int32_t* id) CONCLAVE_C_NOTHROW;
// Concurrent as adding one. Forwards that are under way keep it until they end, and graphs that a
// forward was captured in until conclave_layer_forget_graphs. CONCLAVE_ERROR_INVALID_ARGUMENT for
// an id that is none.
CONCLAVE_C_API conclave_status conclave_layer_remove_adapter(conclave_layer* layer,
                                                             int32_t id) CONCLAVE_C_NOTHROW;
// Says that no CUDA graph which holds a forward of the layer, or of one that shares its weights, is
// launched any more: gives back the memory of adapters that were removed since, and sets *bytes,
// unless it is NULL, to its size. Waits for the device. Not while a forward is being captured.
CONCLAVE_C_API conclave_status conclave_layer_forget_graphs(conclave_layer* layer,
                                                            size_t* bytes) CONCLAVE_C_NOTHROW;
// A JSON list of the layer's adapters by id: [{"id": 0, "name": "...", "max_rank": 16,
// "num_factors": 24, "bytes": 4096}]; `bytes` is what this rank holds. Free it with
// conclave_text_free.
CONCLAVE_C_API conclave_status conclave_layer_adapters_json(const conclave_layer* layer,
                                                            char** json) CONCLAVE_C_NOTHROW;

// A directory that PEFT saved: adapter_config.json and adapter_model.safetensors. Immutable.
typedef struct conclave_lora_checkpoint conclave_lora_checkpoint;

// Reads the config and the header, and no tensor. CONCLAVE_ERROR of 200 to 499 naming file and key;
// _UNSUPPORTED for variants that are more than two factors.
CONCLAVE_C_API conclave_status conclave_lora_checkpoint_open(
    const char* directory, conclave_lora_checkpoint** out) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API void conclave_lora_checkpoint_destroy(conclave_lora_checkpoint* checkpoint)
    CONCLAVE_C_NOTHROW;

typedef struct conclave_lora_checkpoint_info {
  size_t struct_size;
  const int64_t* layers;  // [num_layers] with factors, ascending; lives as long as the checkpoint
  size_t num_layers;
  int64_t max_rank;   // max_adapter_rank of layers is at least this
  size_t num_others;  // modules with adapters that are no part of a MoE block
} conclave_lora_checkpoint_info;
CONCLAVE_C_API conclave_status
conclave_lora_checkpoint_get_info(const conclave_lora_checkpoint* checkpoint,
                                  conclave_lora_checkpoint_info* info) CONCLAVE_C_NOTHROW;
// The name of such a module, of those below num_others; lives as long as the checkpoint.
CONCLAVE_C_API conclave_status
conclave_lora_checkpoint_other_at(const conclave_lora_checkpoint* checkpoint, size_t position,
                                  const char** name) CONCLAVE_C_NOTHROW;

// Reads the factors of the layer with this index and adds them, as conclave_layer_add_adapter.
// `model` is the model that the layer is of, or NULL; without it `order` says how gate and up lie
// in a stacked gate_up_proj of its files. CONCLAVE_ERROR_LAYER_NOT_FOUND; _TENSOR_SHAPE for factors
// of another model; _TENSOR_MISSING, _CONFIG_VALUE, _UNSUPPORTED naming the tensor.
CONCLAVE_C_API conclave_status conclave_layer_add_adapter_from_checkpoint(
    conclave_layer* layer, const conclave_lora_checkpoint* checkpoint, int64_t index,
    const conclave_checkpoint* model, conclave_gate_up_order order, int32_t* id) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif
