#include "layer/stages/shared.h"

#include "cpu/parallel.h"
#include "layer/stages/dense_mlp.h"
#include "layer/stages/route.h"

#include <algorithm>
#include <cmath>

namespace conclave::inline v0 {
namespace {

// Rows per task: enough work to outweigh taking the task.
constexpr int64_t kRowsPerTask = 16;

float sigmoid(float value) { return 1.0F / (1.0F + std::exp(-value)); }

// Source of the factors of one token's shared rows.
struct SharedFactors {
  const float* of_token = nullptr;  // [T, S], or null: 1
  int64_t num_shared = 1;

  float at(int64_t token, int64_t shared) const {
    return of_token == nullptr ? 1.0F : of_token[token * num_shared + shared];
  }
};

const float* sigmoid_factors(const PipelineArgs& args, const RowBundle& hidden_rows) {
  auto* gate = slice_as<float>(args.workspace, args.plan.slices.shared_gate);
  args.weights.shared_gate->run(float_rows(args, hidden_rows), gate, DType::kF32, args.executor);
  for (int64_t token = 0; token < args.chunk.count; ++token) gate[token] = sigmoid(gate[token]);
  return gate;
}

const float* average_factors(const PipelineArgs& args) {
  auto* shared = slice_as<float>(args.workspace, args.plan.slices.shared_gate);
  std::fill_n(shared, args.chunk.count, 0.5F);
  std::fill_n(slice_as<float>(args.workspace, args.plan.slices.mix), args.chunk.count, 0.5F);
  return shared;
}

// c = softmax(x W^T + b): c0 goes to the routed part, c1 to the shared one.
const float* softmax_factors(const PipelineArgs& args, const RowBundle& hidden_rows) {
  auto* logits = slice_as<float>(args.workspace, args.plan.slices.mix_logits);
  auto* routed = slice_as<float>(args.workspace, args.plan.slices.mix);
  auto* shared = slice_as<float>(args.workspace, args.plan.slices.shared_gate);
  args.weights.mix_gate->run(float_rows(args, hidden_rows), logits, DType::kF32, args.executor);
  const std::vector<float>& bias = args.weights.mix_gate_bias;
  const float bias_difference = bias.empty() ? 0.0F : bias[0] - bias[1];
  for (int64_t token = 0; token < args.chunk.count; ++token) {
    // A softmax over two is a sigmoid of their difference.
    const float difference = logits[2 * token] - logits[2 * token + 1] + bias_difference;
    routed[token] = sigmoid(difference);
    shared[token] = sigmoid(-difference);
  }
  return shared;
}

SharedFactors factors(const PipelineArgs& args, const RowBundle& hidden_rows) {
  const SharedExpertSpec& shared = args.plan.spec.shared;
  switch (shared.mode) {
    case SharedMode::kSigmoidGate:
      return {.of_token = sigmoid_factors(args, hidden_rows)};
    case SharedMode::kAverage:
      return {.of_token = average_factors(args)};
    case SharedMode::kSoftmaxMix:
      return {.of_token = softmax_factors(args, hidden_rows)};
    case SharedMode::kRouterWeight:
    case SharedMode::kFusedSlots:
      return {.of_token = slice_as<float>(args.workspace, args.plan.slices.shared_weights),
              .num_shared = shared.count};
    case SharedMode::kNone:
    case SharedMode::kAdd:
      break;
  }
  return {};
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

// Leaves sum_i factor_i * row_i of rows [S, count, H] in the first [count, H].
void weigh_rows(const PipelineArgs& args, const SharedFactors& factors, float* rows) {
  const int64_t count = args.chunk.count;
  const int64_t hidden = args.plan.spec.hidden_size;
  const auto weigh = [&](int64_t begin, int64_t end, int32_t) noexcept {
    for (int64_t token = begin; token < end; ++token) {
      float* sum = rows + token * hidden;
      if (!is_token(args, token)) {
        std::fill_n(sum, hidden, 0.0F);
        continue;
      }
      scale_row(factors.at(token, 0), hidden, sum);
      for (int64_t i = 1; i < factors.num_shared; ++i) {
        add_scaled_row(factors.at(token, i), sum + i * count * hidden, hidden, sum);
      }
    }
  };
  cpu::parallel_for(args.executor, count, kRowsPerTask, weigh);
}

}  // namespace

const float* run_shared_experts(const PipelineArgs& args, const RowBundle& hidden_rows) {
  const LayerPlan& plan = args.plan;
  if (plan.shared == nullptr) {
    // Even if another rank adds the shared rows, the routed part needs its factor here.
    if (plan.stages.mixes) static_cast<void>(factors(args, hidden_rows));
    return nullptr;
  }
  auto* rows = slice_as<float>(args.workspace, plan.slices.shared_rows);
  run_on_every_row(
      args,
      {.kernel = *plan.shared,
       .weights = {.gate_up = args.weights.shared_gate_up.data(),
                   .down = args.weights.shared_down.data(),
                   .input_scale = args.weights.shared_static_scales.input,
                   .intermediate_scale = args.weights.shared_static_scales.intermediate},
       .num_experts = plan.spec.shared.count},
      hidden_rows, rows);
  const SharedFactors weights = factors(args, hidden_rows);
  if (weights.of_token != nullptr || !args.args.padding_mask.empty()) {
    weigh_rows(args, weights, rows);
  }
  return rows;
}

}  // namespace conclave::inline v0
