// Router "hash": ids = table[token id], weighed as in "topk" (first layers of DeepSeek-V4).
#pragma once

#include "routing/router.h"

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"
#include "conclave/token_router.h"
#include "conclave/weights.h"

#include <array>
#include <memory>
#include <random>

namespace conclave::inline v0::routing {

bool hash_recalls(const MoeSpec& spec);
// Needs a table of at least one row.
Support hash_supports(const MoeSpec& spec);
std::unique_ptr<Router> make_hash_router(const MoeSpec& spec);
void check_hash(const MoeSpec& spec);
void refuse_hash_fields(const RouterSpec& other);
void limit_hash_fields(const RouterSpec& any);
ReferenceChoice hash_oracle(const MoeSpec& spec, const ReferenceToken& token);
void draw_hash(std::mt19937& generator, MoeSpec& spec);
extern const DeviceRouterRow kHashOnDevice;

// Entries lie in [0, E): Error(kExpertId) naming row, slot and value otherwise.
void check_hash_table(const MoeSpec& spec, const ConstTensorView& rows, int64_t first_row,
                      const std::string& where);
void imply_hash(RouterSpec& router, int64_t rows);

inline constexpr std::array kHashTensors = {RouterTensor{
    .name = "hash_table",
    .id = weights::kHashTable,
    .element = RouterElement::kIndex,
    .size =
        [](const MoeSpec& spec) {
          return RouterTensorSize{.rows = spec.router.vocab_size, .cols = spec.top_k};
        },
    .is_by_token_id = true,
    .check = check_hash_table,
    .index_limit = [](const MoeSpec& spec) { return spec.num_experts; },
    .pattern = "{base}gate.tid2eid",
    .gguf_name = "ffn_gate_tid2eid.weight",
    .gguf_layers_key = "hash_layer_count",
    .imply = imply_hash,
    .weights_field = &ExpertWeights::hash_table,
    .call_field = &RouteArgs::hash_table,
    .publish = [](RouterWeights& weights,
                  const void* values) { weights.hash_table = static_cast<const int32_t*>(values); },
}};

}  // namespace conclave::inline v0::routing
