#include "layer/stages/route.h"

#include "experts/quantize_rows.h"
#include "layer/arguments.h"
#include "layer/stages/gate.h"
#include "layer/stages/given_routing.h"

#include "conclave/error.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0 {
namespace {

int64_t row_stride(const ConstTensorView& tensor) {
  return tensor.row_stride != 0 ? tensor.row_stride : tensor.shape[1];
}

void* row_address(const void* data, int64_t elements, DType dtype) {
  return const_cast<std::byte*>(static_cast<const std::byte*>(data)) + elements * byte_size(dtype);
}

// Copies a dense chunk into the caller's rows from column `first` on, if the caller asked for it.
template <class T>
void capture(const TensorView& destination, const TokenChunk& chunk, const T* source, int64_t cols,
             int64_t first = 0) {
  if (destination.empty()) return;
  const TensorView rows = chunk_rows(destination, chunk);
  for (int64_t row = 0; row < chunk.count; ++row) {
    std::copy_n(source + row * cols, cols,
                static_cast<T*>(rows.data) + row * row_stride(rows) + first);
  }
}

// Writes the slots of SharedMode::kFusedSlots into the captures, after those of the router.
void capture_fused(const PipelineArgs& args, const float* shared_weights) {
  const MoeSpec& spec = args.plan.spec;
  const int64_t num_shared = spec.shared.count;
  capture(args.args.captured_weights, args.chunk, shared_weights, num_shared, spec.top_k);
  if (args.args.captured_ids.empty()) return;
  const TensorView rows = chunk_rows(args.args.captured_ids, args.chunk);
  for (int64_t token = 0; token < args.chunk.count; ++token) {
    int32_t* ids = static_cast<int32_t*>(rows.data) + token * row_stride(rows) + spec.top_k;
    for (int64_t i = 0; i < num_shared; ++i) {
      const bool used = is_token(args, token) && shared_weights[token * num_shared + i] != 0.0F;
      ids[i] = used ? static_cast<int32_t>(spec.num_experts + i) : -1;
    }
  }
}

// Checks a custom router's ids as strictly as a caller's.
void check_router_ids(const PipelineArgs& args, int32_t* ids, ForwardCounters& counters) {
  const int64_t top_k = args.plan.spec.top_k;
  for (int64_t index = 0; index < args.chunk.count * top_k; ++index) {
    if (ids[index] == -1 || is_slot_id(args.plan.spec, 0, ids[index])) continue;
    if (args.plan.options.id_policy == IdPolicy::kStrict) {
      throw Error(ErrorCode::kExpertId,
                  {.what = "router " + args.plan.spec.router.name +
                           " chose an expert that does not exist, at token " +
                           std::to_string(args.chunk.begin + index / top_k) + ", slot " +
                           std::to_string(index % top_k),
                   .found = std::to_string(ids[index]),
                   .limit = "-1 to " + std::to_string(args.plan.spec.num_experts +
                                                      args.plan.spec.num_zero_experts - 1)});
    }
    ++counters.skipped_ids;
    ids[index] = -1;
  }
}

void drop_padding(const PipelineArgs& args, int32_t* ids) {
  if (args.args.padding_mask.empty()) return;
  const int64_t top_k = args.plan.spec.top_k;
  for (int64_t token = 0; token < args.chunk.count; ++token) {
    if (!is_token(args, token)) std::fill_n(ids + token * top_k, top_k, -1);
  }
}

// Destinations of the stage's results for a chunk.
struct RouteBuffers {
  int32_t* ids;
  float* weights;
  float* shared_weights;  // null except for kRouterWeight and kFusedSlots
};

void run_router(const PipelineArgs& args, const RowBundle& rows, const RouteBuffers& buffers,
                ForwardCounters& counters) {
  const LayerPlan& plan = args.plan;
  const MoeSpec& spec = plan.spec;
  const float* logits = logits_of_chunk(args, rows);
  RouterInput input{.num_tokens = args.chunk.count,
                    .num_experts = spec.num_experts,
                    .num_logits = num_logits(spec),
                    .logits = logits,
                    .first_token = args.chunk.begin,
                    .weights = args.weights.router.view(),
                    .scratch = args.workspace.subspan(plan.slices.router_scratch.offset,
                                                      plan.slices.router_scratch.bytes)};
  if (!args.args.topk_ids.empty()) {
    auto* given = slice_as<int32_t>(args.workspace, plan.slices.given_ids);
    load_given_ids(args, given, counters);
    input.given_ids = given;
  }
  if (!args.args.token_ids.empty() && plan.router_traits.token_ids != routing::TokenIds::kUnused) {
    auto* token_ids = slice_as<int32_t>(args.workspace, plan.slices.token_ids);
    load_token_ids(args, token_ids);
    input.token_ids = token_ids;
  }
  const RouterStats stats = plan.router->route(input,
                                               {.topk_ids = buffers.ids,
                                                .topk_weights = buffers.weights,
                                                .shared_weights = buffers.shared_weights},
                                               args.executor);
  counters.tokens_without_finite_logit += stats.tokens_without_finite_logit;
  check_router_ids(args, buffers.ids, counters);
  if (logits != nullptr) {
    capture(args.args.captured_logits, args.chunk, logits, input.num_logits);
  }
}

void weigh_fused_slots(const PipelineArgs& args, const RouteBuffers& buffers,
                       ForwardCounters& counters) {
  const SharedExpertSpec& shared = args.plan.spec.shared;
  if (!args.args.topk_weights.empty()) {
    load_fused_weights(args, buffers.shared_weights);
  } else {
    std::fill_n(buffers.shared_weights, args.chunk.count * shared.count,
                static_cast<float>(shared.slot_weight));
  }
  if (!args.args.topk_ids.empty()) {
    drop_unused_slots(args, buffers.shared_weights, counters);
  }
  capture_fused(args, buffers.shared_weights);
}

void add_load(const PipelineArgs& args, const int32_t* ids) {
  if (args.args.expert_load.empty()) return;
  const MoeSpec& spec = args.plan.spec;
  for (int64_t index = 0; index < args.chunk.count * spec.top_k; ++index) {
    const bool is_expert = ids[index] >= 0 && ids[index] < spec.num_experts;
    if (is_expert) ++args.args.expert_load[static_cast<size_t>(ids[index])];
  }
}

}  // namespace

TensorView chunk_rows(const TensorView& tensor, const TokenChunk& chunk) {
  const int64_t stride = row_stride(tensor);
  return {.data = row_address(tensor.data, chunk.begin * stride, tensor.dtype),
          .dtype = tensor.dtype,
          .shape = {chunk.count, tensor.shape[1]},
          .row_stride = stride};
}

ConstTensorView chunk_rows(const ConstTensorView& tensor, const TokenChunk& chunk) {
  const int64_t stride = row_stride(tensor);
  return {.data = row_address(tensor.data, chunk.begin * stride, tensor.dtype),
          .dtype = tensor.dtype,
          .shape = {chunk.count, tensor.shape[1]},
          .row_stride = stride};
}

bool is_token(const PipelineArgs& args, int64_t token_in_chunk) {
  const ConstTensorView& mask = args.args.padding_mask;
  if (mask.empty()) return true;
  return static_cast<const uint8_t*>(mask.data)[args.chunk.begin + token_in_chunk] != 0;
}

RowBundle float_rows(const PipelineArgs& args, const RowBundle& rows) {
  if (rows.rows != nullptr && rows.dtype == DType::kF32) return rows;
  return experts::quantize_rows(
      chunk_rows(args.args.hidden, args.chunk), DType::kF32, args.plan.gate_row_bytes,
      slice_as<std::byte>(args.workspace, args.plan.slices.gate_rows), args.executor);
}

Routing route_chunk(const PipelineArgs& args, const RowBundle& rows, ForwardCounters& counters) {
  const MoeSpec& spec = args.plan.spec;
  const bool router_weighs_shared = spec.shared.mode == SharedMode::kRouterWeight;
  const bool has_fused_slots = spec.shared.mode == SharedMode::kFusedSlots;
  const LayerSlices& slices = args.plan.slices;
  const RouteBuffers buffers{
      .ids = slice_as<int32_t>(args.workspace, slices.topk_ids),
      .weights = slice_as<float>(args.workspace, slices.topk_weights),
      .shared_weights = router_weighs_shared || has_fused_slots
                            ? slice_as<float>(args.workspace, slices.shared_weights)
                            : nullptr};
  const bool has_weights = !args.args.topk_weights.empty();
  if (args.chunk.count > 0) {
    if (has_weights) {
      load_given_ids(args, buffers.ids, counters);
      load_given_weights(args, buffers.weights);
    } else {
      run_router(args, rows, buffers, counters);
    }
    if (has_fused_slots) weigh_fused_slots(args, buffers, counters);
  }
  drop_padding(args, buffers.ids);
  capture(args.args.captured_ids, args.chunk, buffers.ids, spec.top_k);
  capture(args.args.captured_weights, args.chunk, buffers.weights, spec.top_k);
  add_load(args, buffers.ids);
  return {.num_tokens = args.chunk.count,
          .top_k = spec.top_k,
          .topk_ids = buffers.ids,
          .topk_weights = buffers.weights,
          .shared_weights = buffers.shared_weights};
}

}  // namespace conclave::inline v0
