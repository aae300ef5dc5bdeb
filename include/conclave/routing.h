// Routing results and the Router seam.
#pragma once

#include "conclave/spec.h"
#include "conclave/version.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0 {

class Executor;

// The experts that each token uses. Row-major [T, k]; -1 contributes nothing. Pointers are
// borrowed.
struct Routing {
  int64_t num_tokens = 0;
  int64_t top_k = 0;
  const int32_t* topk_ids = nullptr;
  const float* topk_weights = nullptr;
  const float* shared_weights = nullptr;  // [T, S] for SharedMode::kRouterWeight, otherwise null
};

// The router's own weights, widened to float; null if the spec has none.
struct RouterWeights {
  const float* selection_bias = nullptr;  // [E + Z]
  const float* expert_scale = nullptr;    // [E]
  const float* global_scale = nullptr;    // [1]
  const int32_t* hash_table = nullptr;    // [vocab, k], entries in [0, E)
  // Tensors of a router's own, of float or int32_t, in the order of its row; null for those that
  // the spec does not have, and for routers of the application.
  std::array<const void*, 4> tensors = {};
};

// Valid during one call of route.
struct RouterInput {
  int64_t num_tokens = 0;
  int64_t num_experts = 0;             // E
  int64_t num_logits = 0;              // columns of logits: E, zero experts, shared sinks
  const float* logits = nullptr;       // [T, num_logits]; null for routers that read none
                                       // (simulated)
  const int32_t* token_ids = nullptr;  // [T], in [0, vocab), for router "hash"
  const int32_t* given_ids = nullptr;  // [T, k]: choices to weigh instead of choosing; -1: none
  int64_t first_token = 0;             // number of row 0 in the call (chunked inputs)
  RouterWeights weights = {};
  // The row of token t at banned + t * banned_stride, [E + Z]: nonzero bans an expert; null: none
  // is. Logits of banned experts are -inf already, and what is chosen nevertheless is dropped.
  const uint8_t* banned = nullptr;
  int64_t banned_stride = 0;  // 0: one row for all tokens
  // Columns of the hash table where a call asks for fewer than the spec's k; 0: k.
  int64_t table_columns = 0;
  std::span<std::byte> scratch = {};  // scratch_bytes(), 64-byte aligned, for this call alone
};

// Destination of a route call; ids and weights are [T, k].
struct RouterOutput {
  int32_t* topk_ids = nullptr;
  float* topk_weights = nullptr;
  float* shared_weights = nullptr;  // [T, S], for "sink_softmax" only
};

struct RouterStats {
  int64_t tokens_without_finite_logit = 0;  // added to LayerStatus
};

// A rule from logits to ids and weights. Ids written must lie in [0, E + Z) or be -1; the layer
// checks them: Error(kExpertId) under IdPolicy::kStrict, skipped and counted under kSkip. Thread
// rule: concurrent forwards call route concurrently; it may use the executor. It must not allocate
// after its first call with the largest T: it asks for memory beside its outputs with
// scratch_bytes. A call that asks for fewer experts than MoeSpec::top_k is given a router of its
// own, made for a spec with that k.
class CONCLAVE_API Router {
 public:
  virtual ~Router() = default;
  // Bytes of RouterInput::scratch for an executor of `workers` workers.
  virtual size_t scratch_bytes(int32_t workers) const;
  virtual RouterStats route(const RouterInput& input, const RouterOutput& output,
                            Executor& executor) const = 0;
};

// The RouterSpec of a routing method of vLLM (its RoutingMethodType), by name: "Default",
// "Renormalize", "DeepSeekV3", "Llama4", "RenormalizeNaive", "TopK", "SigmoidRenorm", "MiniMax2",
// "Sigmoid", "DeepseekV4", "Simulated". Sizes (groups), scales and the vocabulary stay at their
// defaults: set them from the model. docs/routing.md has the formulas.
// Throws Error(kUnknownName) listing the names.
CONCLAVE_API RouterSpec routing_method(std::string_view name);

}  // namespace conclave::inline v0
