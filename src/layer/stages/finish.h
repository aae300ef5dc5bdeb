// The steps between the weighted sum over slots and the output.
#pragma once

#include "core/flow.h"

#include "conclave/context.h"
#include "conclave/routing.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

// Sums of routed experts in float32, [T, columns] in rows of `stride` elements.
struct SumRows {
  float* rows = nullptr;
  int64_t num_rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;
};

// Writes zeros behind the columns of every row, as products read whole rows.
void pad_sums(const SumRows& sums);

// to = from / sqrt(mean(from^2) + epsilon) * weight for every row, in float32 except for the sum of
// squares. Rows of `from` lie as those of `to` and may be the same.
void rms_norm_sums(const float* from, const std::vector<float>& weight, double epsilon,
                   const SumRows& to, Executor& executor);

// [T]: the weights of each token's zero experts, whose ids follow `num_experts`, added in the order
// of its slots.
const float* sum_identity_weights(const Routing& routing, int64_t num_experts, float* sums);

// The sums as rows for a product.
inline RowBundle row_bundle(const float* rows, const SumRows& like) {
  return {.rows = static_cast<const std::byte*>(static_cast<const void*>(rows)),
          .num_rows = like.num_rows,
          .row_bytes = like.stride * int64_t{sizeof(float)},
          .dtype = DType::kF32};
}

}  // namespace conclave::inline v0
