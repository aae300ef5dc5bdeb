#include "layer/stages/input.h"

#include "experts/quantize_rows.h"

#include <algorithm>

namespace conclave::inline v0 {

ExpertInput convert_expert_input(const ConstTensorView& source, const Routing& routing,
                                 const experts::BatchRequirements& wanted, std::byte* to,
                                 Executor& executor) {
  return {.rows = experts::quantize_rows(source, wanted.row_dtype, wanted.row_bytes, to, executor),
          .routing = routing};
}

ExpertInput weigh_expert_input(const ConstTensorView& source, const Routing& routing,
                               const experts::BatchRequirements& wanted, std::byte* to, float* ones,
                               Executor& executor) {
  const int64_t choices = routing.num_tokens * routing.top_k;
  std::fill_n(ones, choices, 1.0F);
  return {
      .rows = experts::quantize_weighted_rows(source, routing.topk_weights, routing.top_k,
                                              wanted.row_dtype, wanted.row_bytes, to, executor),
      .routing = {
          .num_tokens = choices, .top_k = 1, .topk_ids = routing.topk_ids, .topk_weights = ones}};
}

}  // namespace conclave::inline v0
