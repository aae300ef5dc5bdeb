#include "layer/reference/arguments.h"

#include "core/max_ranks.h"
#include "core/shared_facts.h"
#include "layer/arguments.h"
#include "layer/choice_limits.h"
#include "routing/router.h"

#include "conclave/error.h"

#include <initializer_list>
#include <string>
#include <string_view>

namespace conclave::inline v0 {
namespace {

constexpr std::initializer_list<DType> kFloats = {DType::kF32, DType::kF16, DType::kBF16,
                                                  DType::kF64};
constexpr std::initializer_list<DType> kIds = {DType::kI32, DType::kI64};

[[noreturn]] void refuse(const char* tensor, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, {.what = what, .tensor = tensor});
}

void check_routing(const ReferenceArgs& args, const MoeSpec& spec) {
  const routing::RouterTraits router = routing::router_traits(spec);
  const bool has_ids = !args.topk_ids.empty();
  const bool has_weights = !args.topk_weights.empty();
  if (has_weights && !has_ids) refuse("topk_ids", "topk_weights need topk_ids");
  const bool runs_router = !has_weights || shared_facts(spec).by_router();
  if (!runs_router) return;
  const bool has_logits = !args.router_logits.empty() || spec.has_gate;
  if (!has_logits && router.reads_logits) {
    refuse("router_logits", "the router needs logits, and this layer has no gate");
  }
  const bool needs_token_ids = router.token_ids == routing::TokenIds::kNeeded;
  if (needs_token_ids && !has_ids && args.token_ids.empty()) {
    refuse("token_ids",
           "router " + spec.router.name + " chooses by token ids: give them, or topk_ids");
  }
}

void check_adapters(const ReferenceArgs& args, const MoeSpec& spec, int64_t tokens) {
  for (const LoraAdapter& adapter : args.adapters) check_adapter(adapter, spec);
  if (args.adapter_ids.empty()) return;
  check_vector("adapter_ids", args.adapter_ids, tokens, kIds);
  const auto count = static_cast<int64_t>(args.adapters.size());
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t id = load_token_id(args.adapter_ids, token);
    if (id >= -1 && id < count) continue;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a token has an adapter that was not given",
                 .tensor = "adapter_ids[" + std::to_string(token) + "]",
                 .found = std::to_string(id),
                 .limit = std::to_string(count) + " adapters"});
  }
}

void check_slices(const ReferenceArgs& args) {
  if (args.tp_size >= 1 && args.tp_size <= kMaxRanks) return;
  throw Error(ErrorCode::kInvalidArgument, {.what = "no layer has so many slices",
                                            .tensor = "tp_size",
                                            .found = std::to_string(args.tp_size),
                                            .limit = "1 to " + std::to_string(kMaxRanks)});
}

}  // namespace

void check_reference_arguments(const ReferenceArgs& args, const MoeSpec& spec) {
  check_slices(args);
  if (args.hidden.shape.rank() != 2) {
    throw Error(ErrorCode::kShape, {.what = "an argument has the wrong shape",
                                    .tensor = "hidden",
                                    .expected = "[T, " + std::to_string(spec.hidden_size) + "]",
                                    .found = args.hidden.shape.to_string()});
  }
  const int64_t tokens = args.hidden.shape[0];
  const auto check = [tokens](std::string_view name, const ConstTensorView& tensor, int64_t cols,
                              std::initializer_list<DType> dtypes) {
    if (!tensor.empty()) check_matrix(name, tensor, {tokens, cols}, dtypes);
  };
  check_matrix("hidden", args.hidden, {tokens, spec.hidden_size}, kFloats);
  check("router_logits", args.router_logits, num_logits(spec), kFloats);
  check("topk_ids", args.topk_ids, num_slots(spec), kIds);
  check("topk_weights", args.topk_weights, num_slots(spec), kFloats);
  check("router_input", args.router_input, spec.hidden_size, kFloats);
  check("residual_input", args.residual_input, spec.hidden_size, kFloats);
  if (!args.token_ids.empty()) check_vector("token_ids", args.token_ids, tokens, kIds);
  check_choice_limits({.top_k = args.top_k,
                       .banned_experts = args.banned_experts,
                       .gives_ids = !args.topk_ids.empty(),
                       .padding_mask = {}},
                      spec, tokens, tokens);
  check_adapters(args, spec, tokens);
  if (tokens != 0) check_routing(args, spec);
}

}  // namespace conclave::inline v0
