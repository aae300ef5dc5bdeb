// C interface: weights of a layer, from files, from tensors by name, or from an application's
// memory.
#pragma once

#include "conclave/c/spec.h"

#if defined(__cplusplus)
extern "C" {
#endif

// The weights of one layer, from which layers are made and reloaded. Holds the checkpoint or the
// feed that it comes from.
typedef struct conclave_source conclave_source;

// The order of the rows in a gate_up tensor of I gate rows and I up rows.
typedef int32_t conclave_gate_up_order;
enum {
  CONCLAVE_GATE_UP_ORDER_CONCATENATED = 0,  // gate rows, then up rows
  CONCLAVE_GATE_UP_ORDER_INTERLEAVED = 1,   // gate 0, up 0, gate 1, up 1, ...
  CONCLAVE_GATE_UP_ORDER_SINGLE = 2         // I rows of the one product without a gate
};
typedef struct conclave_source_options {
  size_t struct_size;
  conclave_gate_up_order order;
  conclave_gate_up_order shared_order;
  conclave_gate_up_order residual_order;
  conclave_memory memory;  // all tensors lie in it
  // A part of a layer, as refits take them (conclave/c/refit.h): any tensor may be left out, and
  // those of routed experts hold `experts` alone, in this order; without any all `num_experts`.
  // Input scales may hold all of them.
  int64_t num_experts;     // E of the layer; 0: the tensors are those of a whole layer
  const int32_t* experts;  // [experts_count]; none without num_experts
  size_t experts_count;
} conclave_source_options;

// Weights in the caller's memory, by the names of the C++ ExpertWeights (conclave/weights.h, with
// their shapes): "gate_up" [E, 2 I, H] and "down" [E, H, I] are needed, "router" [logits, H] for a
// layer with a gate, others as the spec asks for them: "gate_up_bias", "gate_up_scale",
// "shared_down", ...; any other name is that of a router's own tensor. Rows are dense. The memory
// outlives the source, and a layer that uses it in place (conclave_layer_options::weights, and
// device memory). CONCLAVE_ERROR_SHAPE, _DTYPE, _STRIDE, _MISALIGNED naming the tensor;
// _NULL_POINTER for one that is needed and not listed; _UNKNOWN_NAME; _TENSOR_DUPLICATE for a name
// that comes twice. What only the spec asks for is missed when a layer is made.
CONCLAVE_C_API conclave_status conclave_source_from_tensors(
    const conclave_named_tensor* tensors, size_t count, const conclave_source_options* options,
    conclave_source** out) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API void conclave_source_destroy(conclave_source* source) CONCLAVE_C_NOTHROW;

// The weights of a model pushed tensor by tensor, under the names that its files have, in any
// order: with all types and quantisations that files may have. One thread at a time may use it,
// and none while a layer is made or reloaded from a source of it.
typedef struct conclave_feed conclave_feed;

// A feed for the layers that the text of a config.json describes.
CONCLAVE_C_API conclave_status conclave_feed_from_config(const char* config_json,
                                                         conclave_feed** out) CONCLAVE_C_NOTHROW;
// A feed for `num_layers` layers of one spec by the names of a family ("qwen3_moe"). `quantization`
// is the text of a quantization_config where a method packs the experts, and `spec` is then that of
// the layer without it; otherwise NULL.
CONCLAVE_C_API conclave_status conclave_feed_from_spec(const conclave_spec* spec,
                                                       const char* model_type,
                                                       const int64_t* layers, size_t num_layers,
                                                       const char* quantization,
                                                       conclave_feed** out) CONCLAVE_C_NOTHROW;
// A feed for a GGUF model, by the first bytes of its file: all of its header, and any number behind
// it.
CONCLAVE_C_API conclave_status conclave_feed_from_gguf(const void* header, size_t bytes,
                                                       conclave_feed** out) CONCLAVE_C_NOTHROW;

// Who has the memory of a tensor that is put.
typedef int32_t conclave_feed_memory;
enum {
  CONCLAVE_FEED_MEMORY_COPY = 0,  // the feed copies it
  CONCLAVE_FEED_MEMORY_KEEP = 1   // the caller, until the feed and its sources are ended
};
// Takes a tensor under its full name, "model.layers.0.mlp.gate.weight". `used`, if not NULL, is set
// to 1 if a MoE layer has a use for it, and to 0 for others, which are forgotten.
// CONCLAVE_ERROR_TENSOR_DUPLICATE, _TENSOR_SHAPE, _TENSOR_UNEXPECTED and what its name breaks.
CONCLAVE_C_API conclave_status conclave_feed_put(conclave_feed* feed, const char* name,
                                                 const conclave_tensor* tensor,
                                                 conclave_feed_memory memory,
                                                 int32_t* used) CONCLAVE_C_NOTHROW;
// The same for a tensor of a GGUF model: `type` as ggml numbers types (12 is Q4_K), and a shape
// whose last axis is the row. `bytes` is the size of `data`.
CONCLAVE_C_API conclave_status conclave_feed_put_gguf(conclave_feed* feed, const char* name,
                                                      uint32_t type, const int64_t* shape,
                                                      int32_t rank, const void* data, size_t bytes,
                                                      conclave_feed_memory memory,
                                                      int32_t* used) CONCLAVE_C_NOTHROW;
// The number of MoE layers, and the layer at `position` below it, ascending.
CONCLAVE_C_API conclave_status conclave_feed_num_layers(const conclave_feed* feed,
                                                        size_t* num_layers) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API conclave_status conclave_feed_layer_at(const conclave_feed* feed, size_t position,
                                                      int64_t* layer) CONCLAVE_C_NOTHROW;
// Sets *complete to 1 once all tensors of a layer have come. CONCLAVE_ERROR_LAYER_NOT_FOUND.
CONCLAVE_C_API conclave_status conclave_feed_is_complete(const conclave_feed* feed, int64_t layer,
                                                         int32_t* complete) CONCLAVE_C_NOTHROW;
// At most `limit` tensors that have not come yet, "NAME [rows, cols]" a line; "" when complete.
// Free it with conclave_text_free.
CONCLAVE_C_API conclave_status conclave_feed_missing(const conclave_feed* feed, size_t limit,
                                                     char** names) CONCLAVE_C_NOTHROW;
// Makes the spec of a complete layer, its weights included. CONCLAVE_ERROR_LAYER_NOT_FOUND,
// _TENSOR_MISSING.
CONCLAVE_C_API conclave_status conclave_feed_spec(const conclave_feed* feed, int64_t layer,
                                                  conclave_spec** out) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API conclave_status conclave_feed_source(const conclave_feed* feed, int64_t layer,
                                                    conclave_source** out) CONCLAVE_C_NOTHROW;
// Frees what the feed has copied of one layer, which then counts as missing. CONCLAVE_ERROR_STATE
// while a source of the layer lives.
CONCLAVE_C_API conclave_status conclave_feed_release(conclave_feed* feed,
                                                     int64_t layer) CONCLAVE_C_NOTHROW;
CONCLAVE_C_API void conclave_feed_destroy(conclave_feed* feed) CONCLAVE_C_NOTHROW;

#if defined(__cplusplus)
}
#endif
