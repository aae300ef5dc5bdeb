#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/structs.h"
#include "capi/tensors.h"
#include "capi/values.h"
#include "core/max_ranks.h"

#include "conclave/error.h"
#include "conclave/lora.h"

#include <span>
#include <string>

namespace conclave::inline v0::capi {
namespace {

std::span<int64_t> load_of(const conclave_forward_args& given) {
  if (given.expert_load_count > 0) required(given.expert_load, "expert_load");
  if (given.expert_load != nullptr && given.expert_load_count == 0) {
    throw Error(ErrorCode::kShape, {.what = "an argument has the wrong shape",
                                    .tensor = "expert_load",
                                    .expected = "expert_load_count of the layer's experts",
                                    .found = "0"});
  }
  check_aligned("expert_load", given.expert_load, alignof(int64_t));
  return {given.expert_load, given.expert_load_count};
}

std::span<const int64_t> rank_tokens_of(const conclave_forward_args& given) {
  if (given.rank_tokens != nullptr && given.rank_tokens_count == 0) {
    throw Error(ErrorCode::kShape, {.what = "an argument has the wrong shape",
                                    .tensor = "rank_tokens",
                                    .expected = "rank_tokens_count of the layer's ranks",
                                    .found = "0"});
  }
  return array_of(given.rank_tokens, given.rank_tokens_count, "rank_tokens", "rank_tokens_count",
                  kMaxRanks);
}

ForwardArgs args_of(const conclave_forward_args& given) {
  check_aligned("num_tokens", given.num_tokens, alignof(int64_t));
  check_aligned("adapter", given.adapter, alignof(int32_t));
  return {.hidden = needed_view(given.hidden, "hidden"),
          .router_logits = view_of(given.router_logits, "router_logits"),
          .topk_ids = view_of(given.topk_ids, "topk_ids"),
          .topk_weights = view_of(given.topk_weights, "topk_weights"),
          .router_input = view_of(given.router_input, "router_input"),
          .residual_input = view_of(given.residual_input, "residual_input"),
          .token_ids = view_of(given.token_ids, "token_ids"),
          .padding_mask = view_of(given.padding_mask, "padding_mask"),
          .adapter_ids = view_of(given.adapter_ids, "adapter_ids"),
          .adapter = given.adapter == nullptr ? kNoAdapter : *given.adapter,
          .num_tokens = given.num_tokens,
          .top_k = given.top_k,
          .banned_experts = view_of(given.banned_experts, "banned_experts"),
          .expert_budget = given.expert_budget,
          .out = needed_view(given.out, "out"),
          .shared_out = view_of(given.shared_out, "shared_out"),
          .captured_logits = view_of(given.captured_logits, "captured_logits"),
          .captured_ids = view_of(given.captured_ids, "captured_ids"),
          .captured_weights = view_of(given.captured_weights, "captured_weights"),
          .expert_load = load_of(given),
          .rank_tokens = rank_tokens_of(given),
          .workspace = given.workspace == nullptr ? nullptr : &given.workspace->workspace,
          .stream = {given.stream}};
}

void add(const StageTimings& times, conclave_timings* to, conclave_timings sum) {
  sum.route_ns += times.route_ns;
  sum.dispatch_ns += times.dispatch_ns;
  sum.experts_ns += times.experts_ns;
  sum.shared_ns += times.shared_ns;
  sum.combine_ns += times.combine_ns;
  sum.total_ns += times.total_ns;
  fill(to, sum);
}

void forward(const MoeLayer& layer, const conclave_forward_args& given) {
  ForwardArgs args = args_of(given);
  if (given.timings == nullptr) return layer.forward(args);
  const conclave_timings before = take(given.timings, "timings");
  StageTimings times;
  args.timings = &times;
  layer.forward(args);
  add(times, given.timings, before);
}

}  // namespace
}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_layer_forward(const conclave_layer* layer,
                                       const conclave_forward_args* args) noexcept {
  return capi::guarded([&] {
    const conclave::MoeLayer& of = capi::required(layer, "layer").layer;
    capi::forward(of, capi::take(args, "args"));
  });
}

conclave_status conclave_workspace_create(const conclave_context* context, size_t bytes,
                                          void* stream, conclave_workspace** out) noexcept {
  return capi::guarded([&] {
    const auto& state = capi::required(context, "context").state;
    capi::required(out, "out");
    capi::hand_out(out, state,
                   conclave::Workspace(*state->context, bytes, conclave::Stream{stream}));
  });
}

conclave_status conclave_workspace_borrow(const conclave_context* context, void* memory,
                                          size_t bytes, void* stream,
                                          conclave_workspace** out) noexcept {
  return capi::guarded([&] {
    const auto& state = capi::required(context, "context").state;
    auto* const data = static_cast<std::byte*>(memory);
    capi::required(data, "memory");
    capi::required(out, "out");
    capi::hand_out(
        out, state,
        conclave::Workspace(*state->context, std::span(data, bytes), conclave::Stream{stream}));
  });
}

void conclave_workspace_destroy(conclave_workspace* workspace) noexcept { delete workspace; }
