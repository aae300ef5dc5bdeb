#include "layer/stages/route.h"

#include "core/shared_facts.h"
#include "layer/arguments.h"
#include "layer/stages/given_routing.h"

#include "conclave/error.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0 {
namespace {

// Checks a custom router's ids as strictly as a caller's.
void check_router_ids(const RouteRule& rule, const RouteInputs& inputs, int32_t* ids,
                      KernelCounts& counts) {
  const MoeSpec& spec = rule.spec;
  const int64_t choices = inputs.choices(spec);
  for (int64_t index = 0; index < inputs.num_tokens * choices; ++index) {
    if (ids[index] == -1 || is_slot_id(spec, 0, ids[index])) continue;
    if (rule.id_policy == IdPolicy::kStrict) {
      throw Error(
          ErrorCode::kExpertId,
          {.what = "router " + spec.router.name +
                   " chose an expert that does not exist, at token " +
                   std::to_string(inputs.first_token + index / choices) + ", slot " +
                   std::to_string(index % choices),
           .found = std::to_string(ids[index]),
           .limit = "-1 to " + std::to_string(spec.num_experts + spec.num_zero_experts - 1)});
    }
    ++counts.skipped_ids;
    ids[index] = -1;
  }
}

void run_router(const RouteRule& rule, const RouteInputs& inputs, const RouteBuffers& buffers,
                KernelCounts& counts, Executor& executor) {
  const MoeSpec& spec = rule.spec;
  RouterInput input{.num_tokens = inputs.num_tokens,
                    .num_experts = spec.num_experts,
                    .num_logits = num_logits(spec),
                    .logits = inputs.logits,
                    .first_token = inputs.first_token,
                    .weights = rule.weights,
                    .banned = inputs.banned.rows,
                    .banned_stride = inputs.banned.stride,
                    .table_columns = spec.top_k,
                    .scratch = buffers.scratch};
  const int64_t choices = inputs.choices(spec);
  if (!inputs.topk_ids.empty()) {
    load_given_ids(spec, inputs.topk_ids, buffers.given_ids, counts);
    if (choices < spec.top_k) {
      routing::keep_first_slots(inputs.num_tokens, spec.top_k, choices, buffers.given_ids);
    }
    input.given_ids = buffers.given_ids;
  }
  if (!inputs.token_ids.empty() && rule.traits.token_ids != routing::TokenIds::kUnused) {
    load_token_ids(inputs.token_ids, inputs.padding, buffers.token_ids);
    input.token_ids = buffers.token_ids;
  }
  const RouterStats stats = rule.router.route(input,
                                              {.topk_ids = buffers.ids,
                                               .topk_weights = buffers.weights,
                                               .shared_weights = buffers.shared_weights},
                                              executor);
  counts.tokens_without_finite_logit += stats.tokens_without_finite_logit;
  check_router_ids(rule, inputs, buffers.ids, counts);
  if (choices < spec.top_k) {
    routing::spread_slots(inputs.num_tokens, choices, spec.top_k, buffers.ids, buffers.weights);
  }
}

// Takes routing that the caller gave whole; of its slots the first ones count where the call asks
// for fewer.
void take_given(const MoeSpec& spec, const RouteInputs& inputs, const RouteBuffers& buffers,
                KernelCounts& counts) {
  load_given_ids(spec, inputs.topk_ids, buffers.ids, counts);
  load_given_weights(inputs.topk_weights, 0, spec.top_k, buffers.weights);
  const int64_t choices = inputs.choices(spec);
  if (choices == spec.top_k) return;
  routing::drop_last_slots(inputs.num_tokens, spec.top_k, choices, buffers.ids, buffers.weights);
}

// Weights of the slots of SharedMode::kFusedSlots.
void weigh_fused_slots(const MoeSpec& spec, const RouteInputs& inputs, float* shared_weights,
                       KernelCounts& counts) {
  const SharedExpertSpec& shared = spec.shared;
  if (!inputs.topk_weights.empty()) {
    load_given_weights(inputs.topk_weights, spec.top_k, shared.count, shared_weights);
  } else {
    std::fill_n(shared_weights, inputs.num_tokens * shared.count,
                static_cast<float>(shared.slot_weight));
  }
  if (!inputs.topk_ids.empty()) drop_unused_slots(spec, inputs.topk_ids, shared_weights, counts);
}

void drop_padding(const RouteInputs& inputs, int64_t top_k, int32_t* ids) {
  if (!inputs.padding.may_exist()) return;
  for (int64_t token = 0; token < inputs.num_tokens; ++token) {
    if (!inputs.padding.is_token(token)) std::fill_n(ids + token * top_k, top_k, -1);
  }
}

// Copies dense rows into the caller's from column `first` on, if the caller asked for them.
void capture(const TensorView& to, const void* from, int64_t cols, int64_t first = 0) {
  if (to.empty()) return;
  const int64_t element = byte_size(to.dtype);
  const auto bytes = static_cast<size_t>(cols * element);
  for (int64_t row = 0; row < to.shape[0]; ++row) {
    const auto* source = static_cast<const std::byte*>(from) + row * cols * element;
    std::copy_n(source, bytes,
                static_cast<std::byte*>(to.data) + (row * to.row_stride + first) * element);
  }
}

// The slots of SharedMode::kFusedSlots stand after those of the router.
void capture_fused(const MoeSpec& spec, const RouteInputs& inputs, const float* shared_weights,
                   const RouteCaptures& captures) {
  const int64_t num_shared = spec.shared.count;
  capture(captures.weights, shared_weights, num_shared, spec.top_k);
  if (captures.ids.empty()) return;
  for (int64_t token = 0; token < inputs.num_tokens; ++token) {
    int32_t* const ids =
        static_cast<int32_t*>(captures.ids.data) + token * captures.ids.row_stride + spec.top_k;
    for (int64_t i = 0; i < num_shared; ++i) {
      const bool used =
          inputs.padding.is_token(token) && shared_weights[token * num_shared + i] != 0.0F;
      ids[i] = used ? static_cast<int32_t>(spec.num_experts + i) : -1;
    }
  }
}

}  // namespace

RouteResult route(const RouteRule& rule, const RouteInputs& inputs, const RouteBuffers& buffers,
                  Executor& executor) {
  const MoeSpec& spec = rule.spec;
  RouteResult result{.routing = {.num_tokens = inputs.num_tokens,
                                 .top_k = spec.top_k,
                                 .topk_ids = buffers.ids,
                                 .topk_weights = buffers.weights,
                                 .shared_weights = buffers.shared_weights},
                     .counts = {}};
  if (inputs.num_tokens == 0) return result;
  if (inputs.topk_weights.empty()) {
    run_router(rule, inputs, buffers, result.counts, executor);
  } else {
    take_given(spec, inputs, buffers, result.counts);
  }
  if (inputs.banned.any()) {
    routing::drop_banned(inputs.num_tokens, spec.top_k, inputs.banned, buffers.ids,
                         buffers.weights);
    if (inputs.topk_ids.empty() && routing::bans_leave_groups(spec)) {
      routing::drop_weightless(inputs.num_tokens, spec.top_k, buffers.ids, buffers.weights);
    }
  }
  if (shared_facts(spec).has_slots()) {
    weigh_fused_slots(spec, inputs, buffers.shared_weights, result.counts);
  }
  drop_padding(inputs, spec.top_k, buffers.ids);
  return result;
}

void capture_logits(const MoeSpec& spec, int64_t num_tokens, const float* logits,
                    const TensorView& to) {
  if (num_tokens != 0 && logits != nullptr) capture(to, logits, num_logits(spec));
}

void capture_routing(const MoeSpec& spec, const RouteInputs& inputs, const Routing& routing,
                     const RouteCaptures& captures) {
  if (inputs.num_tokens == 0) return;
  if (inputs.logits != nullptr) capture(captures.logits, inputs.logits, num_logits(spec));
  capture(captures.ids, routing.topk_ids, spec.top_k);
  capture(captures.weights, routing.topk_weights, spec.top_k);
  if (shared_facts(spec).has_slots()) {
    capture_fused(spec, inputs, routing.shared_weights, captures);
  }
  if (captures.expert_load.empty()) return;
  for (int64_t index = 0; index < inputs.num_tokens * spec.top_k; ++index) {
    const int32_t id = routing.topk_ids[index];
    if (id >= 0 && id < spec.num_experts) ++captures.expert_load[static_cast<size_t>(id)];
  }
}

}  // namespace conclave::inline v0
