#include "layer/stages/given_routing.h"

#include "layer/arguments.h"
#include "layer/stages/route.h"

#include "conclave/tensor.h"

#include <algorithm>

namespace conclave::inline v0 {
namespace {

// The columns [first, first + count) of this chunk's rows of a [T, n] argument.
ConstTensorView chunk_columns(const PipelineArgs& args, const ConstTensorView& tensor,
                              int64_t first, int64_t count) {
  ConstTensorView rows = chunk_rows(tensor, args.chunk);
  rows.data = static_cast<const std::byte*>(rows.data) + first * byte_size(rows.dtype);
  rows.shape = {args.chunk.count, count};
  return rows;
}

void load_weights(const PipelineArgs& args, int64_t first, int64_t count, float* weights) {
  convert(chunk_columns(args, args.args.topk_weights, first, count),
          {.data = weights, .dtype = DType::kF32, .shape = {args.chunk.count, count}});
}

}  // namespace

void load_given_ids(const PipelineArgs& args, int32_t* ids, ForwardCounters& counters) {
  const int64_t top_k = args.plan.spec.top_k;
  const ConstTensorView given = chunk_rows(args.args.topk_ids, args.chunk);
  for (int64_t token = 0; token < args.chunk.count; ++token) {
    for (int64_t slot = 0; slot < top_k; ++slot) {
      // Ids are compared in 64 bits: an int64 id must not become valid by truncation.
      const int64_t id = load_id(given, token, slot);
      const bool valid = is_slot_id(args.plan.spec, slot, id);
      if (!valid && id != -1) ++counters.skipped_ids;
      ids[token * top_k + slot] = valid ? static_cast<int32_t>(id) : -1;
    }
  }
}

void load_given_weights(const PipelineArgs& args, float* weights) {
  load_weights(args, 0, args.plan.spec.top_k, weights);
}

void load_fused_weights(const PipelineArgs& args, float* shared_weights) {
  const MoeSpec& spec = args.plan.spec;
  load_weights(args, spec.top_k, spec.shared.count, shared_weights);
}

void drop_unused_slots(const PipelineArgs& args, float* shared_weights, ForwardCounters& counters) {
  const MoeSpec& spec = args.plan.spec;
  const int64_t num_shared = spec.shared.count;
  const ConstTensorView given = chunk_rows(args.args.topk_ids, args.chunk);
  for (int64_t token = 0; token < args.chunk.count; ++token) {
    for (int64_t i = 0; i < num_shared; ++i) {
      const int64_t id = load_id(given, token, spec.top_k + i);
      if (is_slot_id(spec, spec.top_k + i, id)) continue;
      if (id != -1) ++counters.skipped_ids;
      shared_weights[token * num_shared + i] = 0;
    }
  }
}

void load_token_ids(const PipelineArgs& args, int32_t* token_ids) {
  for (int64_t token = 0; token < args.chunk.count; ++token) {
    const bool counts = is_token(args, token);
    token_ids[token] =
        counts ? static_cast<int32_t>(load_token_id(args.args.token_ids, args.chunk.begin + token))
               : 0;
  }
}

}  // namespace conclave::inline v0
