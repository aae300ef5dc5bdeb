// What one MoE layer is: sizes, router, activation, shared experts, and how it is split over ranks.
// Letters used in all docs: T tokens, E experts, k choices per token, H hidden, I intermediate.
#pragma once

#include "conclave/dtype.h"
#include "conclave/version.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::inline v0 {

enum class RouterScore : uint8_t { kSoftmax };
enum class Renormalize : uint8_t { kNone, kSum };

// The router, as values. `name` is a row of the router catalog (or of Context::add_router);
// "topk" is: score all experts, take the k best, renormalise.
struct RouterSpec {
  std::string name = "topk";
  RouterScore score = RouterScore::kSoftmax;
  Renormalize renormalize = Renormalize::kSum;
  // The layer's own gate rounds its float32 product to this type first, as the model family's
  // published code does; logits given by the caller are used as they are.
  DType logits_dtype = DType::kF32;
};

// `name` is a row of the activation list: "silu" is silu(gate) * up.
struct ActivationSpec {
  std::string name = "silu";
};

enum class SharedMode : uint8_t {
  kNone,
  kAdd,          // out = routed + shared(x)
  kSigmoidGate,  // out = routed + sigmoid(x . w) * shared(x), w = WeightRole::kSharedExpertGate
};

struct SharedExpertSpec {
  SharedMode mode = SharedMode::kNone;
  int64_t intermediate_size = 0;
};

struct MoeSpec {
  int64_t num_experts = 0;        // E, over all ranks
  int64_t top_k = 0;              // k, 1 <= k <= E
  int64_t hidden_size = 0;        // H
  int64_t intermediate_size = 0;  // I
  DType weight_dtype = DType::kBF16;
  RouterSpec router;
  ActivationSpec activation;
  SharedExpertSpec shared;
  bool has_gate = true;  // the layer owns a gate product [E, H] (WeightRole::kRouter)
};

// How experts map to ranks. kLinear: contiguous ranges, the first E % ranks ranks hold one more.
// kRoundRobin: expert e on rank e % ranks.
enum class PlacementStrategy : uint8_t { kLinear, kRoundRobin };

struct ParallelSpec {
  int32_t ep_size = 1;
  int32_t ep_rank = 0;
  PlacementStrategy placement = PlacementStrategy::kLinear;
};

// Throws Error(kInvalidArgument or kShape) naming the field, the value and the limit.
CONCLAVE_API void validate(const MoeSpec& spec);
CONCLAVE_API void validate(const ParallelSpec& parallel);

// Weight elements of one layer: all experts, shared expert and gate; and those one token uses.
struct ParameterCount {
  int64_t total = 0;
  int64_t active = 0;
};
CONCLAVE_API ParameterCount count_parameters(const MoeSpec& spec);

}  // namespace conclave::inline v0
