#include "layer/stages/gate.h"

#include "core/float_convert.h"
#include "cpu/parallel.h"
#include "experts/quantize_rows.h"
#include "layer/stages/route.h"

#include <cmath>

namespace conclave::inline v0 {
namespace {

constexpr int64_t kRowsPerTask = 16;

float rounded(float value, DType dtype) {
  if (dtype == DType::kBF16) return bf16_to_float(float_to_bf16(value));
  if (dtype == DType::kF16) return f16_to_float(float_to_f16(value));
  return value;
}

// x / sqrt(mean(x^2) + epsilon) * weight * H^-0.5, with one rounding per element.
void norm_row(float* row, const std::vector<float>& weight, double epsilon) {
  const size_t columns = weight.size();
  double squares = 0;
  for (size_t col = 0; col < columns; ++col) squares += double{row[col]} * double{row[col]};
  const auto width = static_cast<double>(columns);
  const double factor = 1.0 / (std::sqrt(squares / width + epsilon) * std::sqrt(width));
  for (size_t col = 0; col < columns; ++col) {
    row[col] = static_cast<float>(double{row[col]} * factor * double{weight[col]});
  }
}

// Always copies rows that are normalised: hidden itself must not change.
RowBundle gate_rows(const PipelineArgs& args, const RowBundle& rows) {
  const bool has_norm = args.plan.spec.router.input_norm.enabled;
  if (args.args.router_input.empty() && !has_norm) return float_rows(args, rows);
  const ConstTensorView source =
      args.args.router_input.empty() ? args.args.hidden : args.args.router_input;
  auto* copy = slice_as<std::byte>(args.workspace, args.plan.slices.gate_rows);
  const RowBundle input = experts::quantize_rows(chunk_rows(source, args.chunk), DType::kF32,
                                                 args.plan.gate_row_bytes, copy, args.executor);
  if (!has_norm) return input;
  const auto norm = [&](int64_t begin, int64_t end, int32_t) noexcept {
    for (int64_t row = begin; row < end; ++row) {
      norm_row(static_cast<float*>(static_cast<void*>(copy + row * args.plan.gate_row_bytes)),
               args.weights.router.input_scale, args.plan.spec.router.input_norm.epsilon);
    }
  };
  cpu::parallel_for(args.executor, args.chunk.count, kRowsPerTask, norm);
  return input;
}

void add_bias(const PipelineArgs& args, float* logits) {
  const std::vector<float>& bias = args.weights.router.logit_bias;
  const DType dtype = args.plan.spec.router.logits_dtype;
  const auto columns = static_cast<int64_t>(bias.size());
  const auto add = [&](int64_t begin, int64_t end, int32_t) noexcept {
    for (int64_t token = begin; token < end; ++token) {
      float* row = logits + token * columns;
      for (int64_t i = 0; i < columns; ++i) {
        row[i] = rounded(row[i] + bias[static_cast<size_t>(i)], dtype);
      }
    }
  };
  cpu::parallel_for(args.executor, args.chunk.count, kRowsPerTask, add);
}

void run_gate(const PipelineArgs& args, const RowBundle& rows, float* logits) {
  const bool has_bias = args.plan.spec.router.has_logit_bias;
  const DType round_to = has_bias ? DType::kF32 : args.plan.spec.router.logits_dtype;
  args.weights.gate->run(gate_rows(args, rows), logits, round_to, args.executor);
  if (has_bias) add_bias(args, logits);
}

}  // namespace

const float* logits_of_chunk(const PipelineArgs& args, const RowBundle& rows) {
  const LayerPlan& plan = args.plan;
  float* logits = slice_as<float>(args.workspace, plan.slices.logits);
  if (!args.args.router_logits.empty()) {
    const ConstTensorView given = chunk_rows(args.args.router_logits, args.chunk);
    const int64_t columns = num_logits(plan.spec);
    // Routers only read: rows that already have their layout are used in place.
    if (given.dtype == DType::kF32 && given.row_stride == columns) {
      return static_cast<const float*>(given.data);
    }
    convert(given, {.data = logits, .dtype = DType::kF32, .shape = {args.chunk.count, columns}});
    return logits;
  }
  if (!plan.spec.has_gate) return nullptr;
  run_gate(args, rows, logits);
  return logits;
}

}  // namespace conclave::inline v0
