// Routing results and the Router seam.
#pragma once

#include "conclave/spec.h"
#include "conclave/version.h"

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace conclave::inline v0 {

class Executor;

// Which experts each token uses. Row-major [T, k]; -1 contributes nothing.
struct Routing {
  int64_t num_tokens = 0;
  int64_t top_k = 0;
  const int32_t* topk_ids = nullptr;
  const float* topk_weights = nullptr;
};

// The router's own weights, widened; null where the spec has none.
struct RouterWeights {
  const float* selection_bias = nullptr;  // [E + Z]
  const float* expert_scale = nullptr;    // [E]
  const float* global_scale = nullptr;    // [1]
  const int32_t* hash_table = nullptr;    // [vocab, k], entries in [0, E)
};

struct RouterInput {
  int64_t num_tokens = 0;
  int64_t num_experts = 0;             // E
  int64_t num_logits = 0;              // columns of logits: E, zero experts, shared sinks
  const float* logits = nullptr;       // [T, num_logits]
  const int32_t* token_ids = nullptr;  // [T], in [0, vocab), of router "hash"
  const int32_t* given_ids = nullptr;  // [T, k]: choices to weigh instead of choosing; -1 none
  int64_t first_token = 0;             // number of row 0 in the call (chunked inputs)
  RouterWeights weights = {};
};

// Destination of a route call, [T, k] each.
struct RouterOutput {
  int32_t* topk_ids = nullptr;
  float* topk_weights = nullptr;
  float* shared_weights = nullptr;  // [T, S], of "sink_softmax" only
};

struct RouterStats {
  int64_t tokens_without_finite_logit = 0;
};

// A rule from logits to ids and weights. Ids written must lie in [0, E + Z) or be -1; the layer
// checks them under IdPolicy::kStrict. Thread rule: concurrent forwards call route concurrently; it
// may use the executor. It must not allocate after its first call with the largest T.
class CONCLAVE_API Router {
 public:
  virtual ~Router() = default;
  virtual RouterStats route(const RouterInput& input, const RouterOutput& output,
                            Executor& executor) const = 0;
};

}  // namespace conclave::inline v0
