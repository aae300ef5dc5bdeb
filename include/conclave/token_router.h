// Routing on its own, for engines with expert kernels of their own: logits to ids and weights by
// any rule of docs/routing.md. MoeLayer does not need it: it routes by itself.
#pragma once

#include "conclave/context.h"
#include "conclave/spec.h"
#include "conclave/tensor.h"
#include "conclave/version.h"

#include <map>
#include <memory>
#include <string>

namespace conclave::inline v0 {

// One call, T tokens. On "cpu" all memory is host memory; on CUDA it is memory of the context's
// device, which must live until the stream has passed.
struct RouteArgs {
  ConstTensorView logits = {};     // [T, num_logits(spec)] f32, f16 or bf16; rows may be apart
  ConstTensorView token_ids = {};  // [T] int32 or int64, for router "hash"
  // Required if the spec has them; f32, f16 or bf16 on "cpu", f32 on CUDA. The table is int32.
  ConstTensorView selection_bias = {};  // [E + Z]
  ConstTensorView expert_scale = {};    // [E]
  ConstTensorView global_scale = {};    // [1]
  ConstTensorView hash_table = {};      // [vocab, k]

  // As in ForwardArgs; "cpu" only.
  int64_t top_k = 0;
  ConstTensorView banned_experts = {};  // [E + Z] or [T, E + Z] bool
  int64_t expert_budget = 0;

  TensorView topk_ids = {};        // [T, k] int32, dense
  TensorView topk_weights = {};    // [T, k] f32, dense
  TensorView shared_weights = {};  // [T, S] f32, dense, for router "sink_softmax"

  Stream stream = {};  // needed on CUDA

  // Tensors of the router's own by name (docs/routing.md), dense: f32, or int32 for ids.
  std::map<std::string, ConstTensorView> tensors = {};
};

// A router given by values. Immutable; calls may run at the same time.
class CONCLAVE_API TokenRouter {
 public:
  // Reads only those fields of `spec` that routing needs: num_experts, top_k, num_zero_experts,
  // router, and shared.count for "sink_softmax"; sizes of matrices may be 0. `context` must outlive
  // the router. Throws Error(kInvalidArgument, kUnknownName) naming the field; kUnsupported with
  // the reason: CUDA takes up to 1024 columns and k = 32, no zero experts and no recorded ids to
  // replay.
  TokenRouter(const Context& context, const MoeSpec& spec);
  TokenRouter(TokenRouter&&) noexcept;
  TokenRouter& operator=(TokenRouter&&) noexcept;
  ~TokenRouter();

  // Ids lie in [0, E + Z). Throws Error(kShape, kDType, kStride, kNullPointer) naming the argument.
  // On "cpu" it allocates its scratch memory and throws Error(kInvalidArgument) for a token id
  // outside the table, a NaN in the selection bias and limits that leave too few experts,
  // Error(kExpertId) for an entry of the table. Ids of slots that limits leave empty are -1.
  // On CUDA it throws Error(kDevice) for memory of another place; a column with a NaN bias is
  // chosen last; a token id outside the table, or an entry that is no expert, chooses nothing: id
  // -1.
  void route(const RouteArgs& args) const;

  const MoeSpec& spec() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace conclave::inline v0
