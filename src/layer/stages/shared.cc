#include "layer/stages/shared.h"

#include "core/shared_facts.h"
#include "cpu/parallel.h"

#include <algorithm>
#include <cmath>

namespace conclave::inline v0 {
namespace {

// Rows per task: enough work to outweigh taking the task.
constexpr int64_t kRowsPerTask = 16;

float sigmoid(float value) { return 1.0F / (1.0F + std::exp(-value)); }

SumFactors sigmoid_factors(const gemm::DenseProduct& product, const RowBundle& hidden, float* gate,
                           Executor& executor) {
  product.run(hidden, gate, DType::kF32, executor);
  for (int64_t token = 0; token < hidden.num_rows; ++token) gate[token] = sigmoid(gate[token]);
  return {.shared = gate};
}

SumFactors average_factors(int64_t tokens, const FactorBuffers& buffers) {
  std::fill_n(buffers.shared, tokens, 0.5F);
  std::fill_n(buffers.routed, tokens, 0.5F);
  return {.shared = buffers.shared, .routed = buffers.routed};
}

// c = softmax(x W^T + b): c0 goes to the routed part, c1 to the shared one.
SumFactors softmax_factors(const FactorWeights& weights, const RowBundle& hidden,
                           const FactorBuffers& buffers, Executor& executor) {
  const float* const logits = buffers.mix_logits;
  weights.mix_gate->run(hidden, buffers.mix_logits, DType::kF32, executor);
  const std::vector<float>& bias = weights.mix_bias;
  const float bias_difference = bias.empty() ? 0.0F : bias[0] - bias[1];
  for (int64_t token = 0; token < hidden.num_rows; ++token) {
    // A softmax over two is a sigmoid of their difference.
    const float difference = logits[2 * token] - logits[2 * token + 1] + bias_difference;
    buffers.routed[token] = sigmoid(difference);
    buffers.shared[token] = sigmoid(-difference);
  }
  return {.shared = buffers.shared, .routed = buffers.routed};
}

// row = factor * row; a factor of 0 writes zeros, even over values that are not finite.
void scale_row(float factor, int64_t columns, float* row) {
  if (factor == 0.0F) {
    std::fill_n(row, columns, 0.0F);
    return;
  }
  for (int64_t col = 0; col < columns; ++col) row[col] *= factor;
}

void add_scaled_row(float factor, const float* row, int64_t columns, float* sum) {
  if (factor == 0.0F) return;
  for (int64_t col = 0; col < columns; ++col) sum[col] += factor * row[col];
}

}  // namespace

SumFactors make_factors(const SharedExpertSpec& spec, const FactorWeights& weights,
                        const RowBundle& hidden, const Routing& routing,
                        const FactorBuffers& buffers, Executor& executor) {
  switch (shared_facts(spec).factor) {
    case SharedFactor::kSigmoid:
      return sigmoid_factors(*weights.shared_gate, hidden, buffers.shared, executor);
    case SharedFactor::kHalf:
      return average_factors(routing.num_tokens, buffers);
    case SharedFactor::kSoftmax:
      return softmax_factors(weights, hidden, buffers, executor);
    case SharedFactor::kRouter:
    case SharedFactor::kSlot:
      return {.shared = routing.shared_weights, .num_shared = spec.count};
    case SharedFactor::kNone:
      break;
  }
  return {};
}

void weigh_shared_rows(const SharedRows& shared, const SumFactors& factors, const Padding& padding,
                       Executor& executor) {
  if (factors.shared == nullptr && !padding.may_exist()) return;
  const int64_t count = shared.num_tokens;
  const int64_t hidden = shared.hidden_size;
  const auto factor = [&](int64_t token, int64_t i) {
    return factors.shared == nullptr ? 1.0F : factors.shared[token * factors.num_shared + i];
  };
  const auto weigh = [&](int64_t begin, int64_t end, int32_t) noexcept {
    for (int64_t token = begin; token < end; ++token) {
      float* sum = shared.rows + token * hidden;
      if (!padding.is_token(token)) {
        std::fill_n(sum, hidden, 0.0F);
        continue;
      }
      scale_row(factor(token, 0), hidden, sum);
      for (int64_t i = 1; i < factors.num_shared; ++i) {
        add_scaled_row(factor(token, i), sum + i * count * hidden, hidden, sum);
      }
    }
  };
  cpu::parallel_for(executor, count, kRowsPerTask, weigh);
}

}  // namespace conclave::inline v0
