#include "layer/reference/parts.h"

#include "core/checked.h"
#include "core/shared_facts.h"
#include "cpu/parallel.h"
#include "layer/reference/float64_mlp.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

// The slots (token * slots + slot) that use each expert, so that its weights are read once.
using ExpertSlots = std::vector<std::pair<int32_t, std::vector<int64_t>>>;
ExpertSlots slots_by_expert(const MoeSpec& spec, const ReferenceResult& result) {
  std::map<int32_t, std::vector<int64_t>> slots;
  for (size_t slot = 0; slot < result.topk_ids.size(); ++slot) {
    const int32_t id = result.topk_ids[slot];
    if (id >= 0 && id < spec.num_experts) slots[id].push_back(static_cast<int64_t>(slot));
  }
  return {slots.begin(), slots.end()};
}

std::vector<double> row_squares(const Float64Matrix& rows) {
  std::vector<double> squares;
  for (int64_t row = 0; row < rows.rows; ++row) {
    squares.push_back(dot(rows.row(row), rows.row(row), rows.cols));
  }
  return squares;
}

double sigmoid(double value) { return 1.0 / (1.0 + std::exp(-value)); }

// y = matrix . x for every row x.
Float64Matrix multiply(const Float64Matrix& matrix, const Float64Matrix& rows) {
  Float64Matrix result{.rows = rows.rows, .cols = matrix.rows, .values = {}};
  for (int64_t row = 0; row < rows.rows; ++row) {
    for (int64_t col = 0; col < matrix.rows; ++col) {
      result.values.push_back(dot(matrix.row(col), rows.row(row), matrix.cols));
    }
  }
  return result;
}

// The rows that routed experts read before any weight: hidden or its projection.
Float64Matrix expert_rows(const MoeSpec& spec, const WeightSource& source,
                          const Float64Matrix& hidden) {
  if (spec.latent.size == 0) return hidden;
  return multiply(read_float64(source, weights::kLatentDown, 0), hidden);
}

// Normalises the combined latent rows in place.
void norm_latent(const MoeSpec& spec, const WeightSource& source, Float64Matrix& rows) {
  const Float64Matrix weight = read_float64(source, weights::kLatentNorm, 0);
  for (int64_t row = 0; row < rows.rows; ++row) {
    double* x = rows.row(row);
    const double mean = dot(x, x, rows.cols) / static_cast<double>(rows.cols);
    const double root = std::sqrt(mean + spec.latent.norm_epsilon);
    for (int64_t col = 0; col < rows.cols; ++col) x[col] *= weight.row(0)[col] / root;
  }
}

// One weighted row per slot, [T * slots, W], zero for a slot without a routed expert; and the
// square of how far ambiguous codes may move each row.
struct SlotRows {
  std::vector<double> rows;
  std::vector<double> allowed;
};
SlotRows weighted_slot_rows(const Context& context, const MoeSpec& spec, const WeightSource& source,
                            const AdaptedRows& input, const ReferenceResult& result,
                            const RowCodes& codes) {
  const Float64Matrix& rows = input.hidden;
  const int64_t width = rows.cols;
  const int64_t slots = num_slots(spec);
  const activation::Activation activation = activation_of(spec, WeightMlp::kRouted);
  const bool weigh_input = spec.weight_on == WeightOn::kInput;
  SlotRows made;
  made.rows.resize(result.topk_ids.size() * static_cast<size_t>(width));
  made.allowed.resize(result.topk_ids.size());
  const ExpertSlots work = slots_by_expert(spec, result);
  const auto run_expert = [&](const Float64Mlp& mlp, int64_t expert,
                              const std::vector<int64_t>& its_slots) {
    const std::vector<Float64Adapter> adapters =
        input.adapters.of_expert(WeightMlp::kRouted, expert);
    std::vector<std::vector<double>> inputs;
    std::vector<Float64Row> batch;
    for (const int64_t slot : its_slots) {
      const double* const x = rows.row(slot / slots);
      std::vector<double>& own = inputs.emplace_back(x, x + width);
      if (weigh_input) {
        for (double& value : own) value *= result.topk_weights[static_cast<size_t>(slot)];
      }
      batch.push_back({.x = own.data(),
                       .out = made.rows.data() + slot * width,
                       .adapter = input.adapters.of_token(adapters, slot / slots)});
    }
    run_mlp(mlp, activation, batch, codes);
    for (size_t i = 0; i < batch.size(); ++i) {
      const auto slot = static_cast<size_t>(its_slots[i]);
      const double weight = weigh_input ? 1.0 : result.topk_weights[slot];
      made.allowed[slot] = batch[i].allowed * weight * weight;
      for (int64_t col = 0; col < width; ++col) batch[i].out[col] *= weight;
    }
  };
  cpu::parallel_for_throwing(context.executor(), static_cast<int64_t>(work.size()), 1,
                             [&](int64_t begin, int64_t end, int32_t) {
                               for (int64_t index = begin; index < end; ++index) {
                                 const auto& [expert, its_slots] = work[static_cast<size_t>(index)];
                                 run_expert(read_mlp(spec, source, WeightMlp::kRouted, expert),
                                            expert, its_slots);
                               }
                             });
  return made;
}

// Zero experts pass their input on.
void add_zero_experts(const MoeSpec& spec, const Float64Matrix& hidden, ReferenceResult& result) {
  if (spec.num_zero_experts == 0) return;
  for (size_t slot = 0; slot < result.topk_ids.size(); ++slot) {
    if (result.topk_ids[slot] < spec.num_experts) continue;
    const int64_t token = static_cast<int64_t>(slot) / num_slots(spec);
    double* out = result.routed.data() + token * hidden.cols;
    for (int64_t col = 0; col < hidden.cols; ++col) {
      out[col] += result.topk_weights[slot] * hidden.row(token)[col];
    }
  }
}

// The weight of shared expert i in a token's sum, before any gate on both parts.
double shared_weight(const MoeSpec& spec, const ReferenceResult& result, int64_t token,
                     int64_t shared) {
  const int64_t count = spec.shared.count;
  if (shared_facts(spec).by_router()) {
    return result.shared_weights[static_cast<size_t>(token * count + shared)];
  }
  if (!shared_facts(spec).has_slots()) return 1;
  const auto slot = static_cast<size_t>(token * num_slots(spec) + spec.top_k + shared);
  return result.topk_ids[slot] < 0 ? 0 : result.topk_weights[slot];
}

// Runs an MLP on every row, a share of them by each worker; finish(token, row) takes what it
// yields.
template <class AdapterOf, class Finish>
void run_in_parallel(const Context& context, const Float64Mlp& mlp,
                     const activation::Activation& activation, const Float64Matrix& input,
                     const RowCodes& codes, const AdapterOf& adapter_of, const Finish& finish) {
  const int64_t share = ceil_div(input.rows, int64_t{context.executor().concurrency()});
  cpu::parallel_for_throwing(
      context.executor(), input.rows, std::max<int64_t>(share, 1),
      [&](int64_t begin, int64_t end, int32_t) {
        Float64Matrix out{.rows = end - begin, .cols = mlp.down.rows(), .values = {}};
        out.values.resize(static_cast<size_t>(out.rows * out.cols));
        std::vector<Float64Row> batch;
        for (int64_t token = begin; token < end; ++token) {
          batch.push_back(
              {.x = input.row(token), .out = out.row(token - begin), .adapter = adapter_of(token)});
        }
        run_mlp(mlp, activation, batch, codes);
        for (int64_t token = begin; token < end; ++token) {
          finish(token, batch[static_cast<size_t>(token - begin)]);
        }
      });
}

void scale(std::vector<double>& rows, int64_t row, int64_t cols, double factor) {
  for (int64_t col = 0; col < cols; ++col) rows[static_cast<size_t>(row * cols + col)] *= factor;
}

}  // namespace

void run_routed(const Context& context, const MoeSpec& spec, const WeightSource& source,
                const AdaptedRows& input, ReferenceResult& result, Allowances& allowances) {
  const Float64Matrix& hidden = input.hidden;
  const Float64Matrix rows = expert_rows(spec, source, hidden);
  const SlotRows slot_rows =
      weighted_slot_rows(context, spec, source, {.hidden = rows, .adapters = input.adapters},
                         result, allowances.codes);
  allowances.routed.assign(static_cast<size_t>(hidden.rows), 0.0);
  Float64Matrix sums{.rows = hidden.rows, .cols = rows.cols, .values = {}};
  sums.values.resize(static_cast<size_t>(hidden.rows * rows.cols));
  const int64_t slots = num_slots(spec);
  for (int64_t index = 0; index < hidden.rows * slots; ++index) {
    double* sum = sums.row(index / slots);
    for (int64_t col = 0; col < rows.cols; ++col) {
      sum[col] += slot_rows.rows[static_cast<size_t>(index * rows.cols + col)];
    }
    allowances.routed[static_cast<size_t>(index / slots)] +=
        slot_rows.allowed[static_cast<size_t>(index)];
  }
  const std::vector<double> before = row_squares(sums);
  if (spec.latent.has_norm) norm_latent(spec, source, sums);
  for (double& value : sums.values) value *= spec.output_scale;
  if (spec.latent.size != 0) {
    sums = multiply(read_float64(source, weights::kLatentUp, 0), sums);
  }
  // Norm, output scale and projection stretch the error of a sum as much as the sum itself.
  const std::vector<double> after = row_squares(sums);
  for (size_t token = 0; token < after.size(); ++token) {
    if (before[token] > 0) allowances.routed[token] *= after[token] / before[token];
  }
  result.routed = std::move(sums.values);
  add_zero_experts(spec, hidden, result);
  if (!spec.has_output_bias) return;
  const Float64Matrix bias = read_float64(source, weights::kOutputBias, 0);
  for (size_t index = 0; index < result.routed.size(); ++index) {
    result.routed[index] += bias.values[index % bias.values.size()];
  }
}

void run_shared(const Context& context, const MoeSpec& spec, const WeightSource& source,
                const AdaptedRows& input, ReferenceResult& result, Allowances& allowances) {
  const Float64Matrix& hidden = input.hidden;
  allowances.shared.assign(static_cast<size_t>(hidden.rows), 0.0);
  if (!shared_facts(spec).is_there) return;
  const activation::Activation activation = activation_of(spec, WeightMlp::kShared);
  result.shared.assign(static_cast<size_t>(hidden.rows * hidden.cols), 0.0);
  for (int64_t expert = 0; expert < spec.shared.count; ++expert) {
    const Float64Mlp mlp = read_mlp(spec, source, WeightMlp::kShared, expert);
    const std::vector<Float64Adapter> adapters =
        input.adapters.of_expert(WeightMlp::kShared, expert);
    const auto adapter_of = [&](int64_t token) { return input.adapters.of_token(adapters, token); };
    run_in_parallel(context, mlp, activation, hidden, allowances.codes, adapter_of,
                    [&](int64_t token, const Float64Row& row) {
                      const double weight = shared_weight(spec, result, token, expert);
                      allowances.shared[static_cast<size_t>(token)] +=
                          weight * weight * row.allowed;
                      double* const sum = result.shared.data() + token * hidden.cols;
                      for (int64_t h = 0; h < hidden.cols; ++h) sum[h] += weight * row.out[h];
                    });
  }
}

void run_residual(const Context& context, const MoeSpec& spec, const WeightSource& source,
                  const Float64Matrix& input, ReferenceResult& result) {
  if (spec.residual.intermediate_size == 0) return;
  const activation::Activation activation = activation_of(spec, WeightMlp::kResidual);
  const Float64Mlp mlp = read_mlp(spec, source, WeightMlp::kResidual, 0);
  result.residual.assign(static_cast<size_t>(input.rows * input.cols), 0.0);
  // These rows are never quantised, so nothing is ambiguous.
  const auto no_adapter = [](int64_t) -> const Float64Adapter* { return nullptr; };
  run_in_parallel(context, mlp, activation, input, RowCodes(), no_adapter,
                  [&](int64_t token, const Float64Row& row) {
                    std::copy_n(row.out, input.cols, result.residual.data() + token * input.cols);
                  });
}

void mix_parts(const MoeSpec& spec, const WeightSource& source, const Float64Matrix& hidden,
               ReferenceResult& result, Allowances& allowances) {
  const SharedFactor factor = shared_facts(spec).factor;
  Float64Matrix gate;
  Float64Matrix bias;
  if (factor == SharedFactor::kSigmoid) {
    gate = read_float64(source, weights::kSharedExpertGate, 0);
  } else if (factor == SharedFactor::kSoftmax) {
    gate = read_float64(source, weights::kMixGate, 0);
    if (source.describe(weights::kMixGateBias).count != 0) {
      bias = read_float64(source, weights::kMixGateBias, 0);
    }
  } else if (factor != SharedFactor::kHalf) {
    return;
  }
  for (int64_t token = 0; token < hidden.rows; ++token) {
    const auto logit = [&](int64_t row) {
      const double value = dot(gate.row(row), hidden.row(token), hidden.cols);
      return bias.values.empty() ? value : value + bias.values[static_cast<size_t>(row)];
    };
    double routed = 0.5;
    double shared = 0.5;
    if (factor == SharedFactor::kSigmoid) {
      routed = 1;
      shared = sigmoid(logit(0));
    } else if (factor == SharedFactor::kSoftmax) {
      const double largest = std::max(logit(0), logit(1));
      const double first = std::exp(logit(0) - largest);
      const double second = std::exp(logit(1) - largest);
      routed = first / (first + second);
      shared = second / (first + second);
    }
    scale(result.routed, token, hidden.cols, routed);
    scale(result.shared, token, hidden.cols, shared);
    allowances.routed[static_cast<size_t>(token)] *= routed * routed;
    allowances.shared[static_cast<size_t>(token)] *= shared * shared;
  }
}

}  // namespace conclave::inline v0
