#include "layer/route_stage.h"

#include "core/float_convert.h"
#include "experts/quantize_rows.h"
#include "layer/arguments.h"

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

float load_float(const ConstTensorView& tensor, int64_t row, int64_t col) {
  const int64_t index = row * row_stride(tensor) + col;
  if (tensor.dtype == DType::kF32) return static_cast<const float*>(tensor.data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(tensor.data)[index];
  return tensor.dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// The weights of the shared experts' slots, [T, S]: null where shared experts have no slots.
float* fused_weights(const PipelineArgs& args) {
  if (args.plan.spec.shared.mode != SharedMode::kFusedSlots) return nullptr;
  return slice_as<float>(args.workspace, args.plan.slices.shared_weights);
}

// Copies a dense chunk into the caller's rows, where the caller asked for them.
template <class T>
void capture(const TensorView& destination, const TokenChunk& chunk, const T* source,
             int64_t cols) {
  if (destination.empty()) return;
  const TensorView rows = chunk_rows(destination, chunk);
  for (int64_t row = 0; row < chunk.count; ++row) {
    std::copy_n(source + row * cols, cols, static_cast<T*>(rows.data) + row * row_stride(rows));
  }
}

// [T, E] float32: the caller's logits widened, or the gate's product.
const float* logits_of_chunk(const PipelineArgs& args, const RowBundle& rows) {
  const LayerPlan& plan = args.plan;
  const int64_t experts = num_logits(plan.spec);
  float* logits = slice_as<float>(args.workspace, plan.slices.logits);
  if (args.args.router_logits.empty()) {
    const bool own_input = !args.args.router_input.empty();
    const RowBundle input =
        own_input
            ? experts::quantize_rows(
                  chunk_rows(args.args.router_input, args.chunk), DType::kF32, plan.gate_row_bytes,
                  slice_as<std::byte>(args.workspace, plan.slices.gate_rows), args.executor)
            : float_rows(args, rows);
    args.weights.gate->run(input, logits, plan.spec.router.logits_dtype, args.executor);
    return logits;
  }
  const ConstTensorView given = chunk_rows(args.args.router_logits, args.chunk);
  for (int64_t token = 0; token < args.chunk.count; ++token) {
    for (int64_t expert = 0; expert < experts; ++expert) {
      logits[token * experts + expert] = load_float(given, token, expert);
    }
  }
  return logits;
}

void load_given_routing(const PipelineArgs& args, int32_t* ids, float* weights,
                        ForwardCounters& counters) {
  const MoeSpec& spec = args.plan.spec;
  const int64_t top_k = spec.top_k;
  const int64_t slots = num_slots(spec);
  float* fused = fused_weights(args);
  const ConstTensorView given_ids = chunk_rows(args.args.topk_ids, args.chunk);
  const ConstTensorView given_weights = chunk_rows(args.args.topk_weights, args.chunk);
  for (int64_t token = 0; token < args.chunk.count; ++token) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      // In 64 bits: an int64 id must not become valid by truncation.
      const int64_t id = load_id(given_ids, token, slot);
      const bool valid = is_slot_id(spec, slot, id);
      if (!valid && id != -1) ++counters.skipped_ids;
      const float weight = load_float(given_weights, token, slot);
      if (slot >= top_k) {
        fused[token * (slots - top_k) + slot - top_k] = valid ? weight : 0.0F;
        continue;
      }
      ids[token * top_k + slot] = valid ? static_cast<int32_t>(id) : -1;
      weights[token * top_k + slot] = weight;
    }
  }
}

// A custom router is trusted no more than a caller's ids are.
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

// Shared experts that are slots: their ids and weights behind the k routed ones.
void capture_fused(const PipelineArgs& args) {
  const float* fused = fused_weights(args);
  if (fused == nullptr) return;
  const MoeSpec& spec = args.plan.spec;
  const int64_t shared = spec.shared.count;
  const auto each = [&](const TensorView& destination, const auto& write) {
    if (destination.empty()) return;
    const TensorView rows = chunk_rows(destination, args.chunk);
    for (int64_t token = 0; token < args.chunk.count; ++token) {
      for (int64_t i = 0; i < shared; ++i) {
        write(rows.data, token * row_stride(rows) + spec.top_k + i, token, i);
      }
    }
  };
  each(args.args.captured_ids, [&](void* data, int64_t at, int64_t token, int64_t i) {
    const bool used = is_token(args, token) && fused[token * shared + i] != 0.0F;
    static_cast<int32_t*>(data)[at] = used ? static_cast<int32_t>(spec.num_experts + i) : -1;
  });
  each(args.args.captured_weights, [&](void* data, int64_t at, int64_t token, int64_t i) {
    static_cast<float*>(data)[at] = fused[token * shared + i];
  });
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
  auto* ids = slice_as<int32_t>(args.workspace, args.plan.slices.topk_ids);
  auto* weights = slice_as<float>(args.workspace, args.plan.slices.topk_weights);
  if (!args.args.topk_ids.empty()) {
    load_given_routing(args, ids, weights, counters);
  } else if (args.chunk.count > 0) {
    const float* logits = logits_of_chunk(args, rows);
    const RouterStats stats =
        args.plan.router->route({.num_tokens = args.chunk.count,
                                 .num_experts = spec.num_experts,
                                 .num_logits = num_logits(spec),
                                 .logits = logits,
                                 .first_token = args.chunk.begin},
                                {.topk_ids = ids, .topk_weights = weights}, args.executor);
    counters.tokens_without_finite_logit += stats.tokens_without_finite_logit;
    check_router_ids(args, ids, counters);
    if (float* fused = fused_weights(args)) {
      std::fill_n(fused, args.chunk.count * spec.shared.count,
                  static_cast<float>(spec.shared.slot_weight));
    }
    capture(args.args.captured_logits, args.chunk, logits, num_logits(spec));
  }
  drop_padding(args, ids);
  capture(args.args.captured_ids, args.chunk, ids, spec.top_k);
  capture(args.args.captured_weights, args.chunk, weights, spec.top_k);
  capture_fused(args);
  if (!args.args.expert_load.empty()) {
    for (int64_t index = 0; index < args.chunk.count * spec.top_k; ++index) {
      const bool routed = ids[index] >= 0 && ids[index] < spec.num_experts;
      if (routed) ++args.args.expert_load[static_cast<size_t>(ids[index])];
    }
  }
  return {.num_tokens = args.chunk.count,
          .top_k = spec.top_k,
          .topk_ids = ids,
          .topk_weights = weights};
}

}  // namespace conclave::inline v0
