#include "conclave/reference.h"

#include "activation/activations.h"
#include "core/float_convert.h"
#include "cpu/parallel.h"
#include "layer/arguments.h"
#include "layer/packed_weights.h"
#include "layer/reference/float64_matrix.h"
#include "routing/router.h"

#include "conclave/error.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

namespace conclave::inline v0 {
namespace {

struct Mlp {
  Float64Matrix gate;
  Float64Matrix up;
  Float64Matrix down;
};

Mlp read_mlp(const WeightSource& source, WeightRole gate, WeightRole up, WeightRole down,
             int64_t expert) {
  return {read_float64(source, gate, expert), read_float64(source, up, expert),
          read_float64(source, down, expert)};
}

// out [H] = down . act(gate . x, up . x)
void run_mlp(const Mlp& mlp, const activation::Activation& activation, const double* x, double* out) {
  std::vector<double> inner(static_cast<size_t>(mlp.gate.rows));
  for (int64_t i = 0; i < mlp.gate.rows; ++i) {
    inner[static_cast<size_t>(i)] = activation::apply_reference(
        activation, dot(mlp.gate.row(i), x, mlp.gate.cols), dot(mlp.up.row(i), x, mlp.up.cols));
  }
  for (int64_t h = 0; h < mlp.down.rows; ++h)
    out[h] = dot(mlp.down.row(h), inner.data(), mlp.down.cols);
}

double round_logit(double logit, DType dtype) {
  if (dtype == DType::kBF16) return bf16_to_float(double_to_bf16(logit));
  if (dtype == DType::kF16) return f16_to_float(double_to_f16(logit));
  return static_cast<float>(logit);
}

void compute_logits(const MoeSpec& spec, const WeightSource& source, const ReferenceArgs& args,
                    const Float64Matrix& hidden, ReferenceResult& result) {
  if (!args.router_logits.empty()) {
    result.logits = to_float64(args.router_logits).values;
    return;
  }
  const Float64Matrix gate = read_float64(source, WeightRole::kRouter, 0);
  result.logits.reserve(static_cast<size_t>(hidden.rows * gate.rows));
  for (int64_t token = 0; token < hidden.rows; ++token) {
    for (int64_t expert = 0; expert < gate.rows; ++expert) {
      const double logit = dot(gate.row(expert), hidden.row(token), gate.cols);
      result.logits.push_back(round_logit(logit, spec.router.logits_dtype));
    }
  }
}

void copy_given_routing(const MoeSpec& spec, const ReferenceArgs& args, int64_t tokens,
                        ReferenceResult& result) {
  result.topk_weights = to_float64(args.topk_weights).values;
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t slot = 0; slot < spec.top_k; ++slot) {
      const int64_t id = load_id(args.topk_ids, token, slot);
      const bool valid = id >= 0 && id < spec.num_experts;
      result.topk_ids.push_back(valid ? static_cast<int32_t>(id) : -1);
    }
  }
}

void route(const MoeSpec& spec, const WeightSource& source, const ReferenceArgs& args,
           const Float64Matrix& hidden, ReferenceResult& result) {
  if (!args.topk_ids.empty()) return copy_given_routing(spec, args, hidden.rows, result);
  compute_logits(spec, source, args, hidden, result);
  const auto slots = static_cast<size_t>(hidden.rows * spec.top_k);
  result.topk_ids.resize(slots);
  result.topk_weights.resize(slots);
  for (int64_t token = 0; token < hidden.rows; ++token) {
    routing::route_reference(spec, result.logits.data() + token * spec.num_experts,
                             result.topk_ids.data() + token * spec.top_k,
                             result.topk_weights.data() + token * spec.top_k);
  }
}

// The slots (token * k + slot) that use each expert: an expert's weights are read once.
std::map<int32_t, std::vector<int64_t>> slots_by_expert(const ReferenceResult& result) {
  std::map<int32_t, std::vector<int64_t>> slots;
  for (size_t slot = 0; slot < result.topk_ids.size(); ++slot) {
    if (result.topk_ids[slot] >= 0)
      slots[result.topk_ids[slot]].push_back(static_cast<int64_t>(slot));
  }
  return slots;
}

void run_routed(const Context& context, const MoeSpec& spec, const WeightSource& source,
                const activation::Activation& activation, const Float64Matrix& hidden,
                ReferenceResult& result) {
  const int64_t width = spec.hidden_size;
  std::vector<double> slot_rows(result.topk_ids.size() * static_cast<size_t>(width));
  const auto by_expert = slots_by_expert(result);
  const std::vector<std::pair<int32_t, std::vector<int64_t>>> work(by_expert.begin(),
                                                                   by_expert.end());
  cpu::parallel_for_throwing(context.executor(), static_cast<int64_t>(work.size()), 1,
                             [&](int64_t begin, int64_t end, int32_t) {
                               for (int64_t index = begin; index < end; ++index) {
                                 const auto& [expert, slots] = work[static_cast<size_t>(index)];
                                 const Mlp mlp =
                                     read_mlp(source, WeightRole::kGate, WeightRole::kUp,
                                              WeightRole::kDown, expert);
                                 for (const int64_t slot : slots) {
                                   run_mlp(mlp, activation, hidden.row(slot / spec.top_k),
                                           slot_rows.data() + slot * width);
                                 }
                               }
                             });
  result.routed.assign(static_cast<size_t>(hidden.rows * width), 0.0);
  for (size_t slot = 0; slot < result.topk_ids.size(); ++slot) {
    if (result.topk_ids[slot] < 0) continue;
    const int64_t token = static_cast<int64_t>(slot) / spec.top_k;
    for (int64_t h = 0; h < width; ++h) {
      result.routed[static_cast<size_t>(token * width + h)] +=
          result.topk_weights[slot] *
          slot_rows[slot * static_cast<size_t>(width) + static_cast<size_t>(h)];
    }
  }
}

void run_shared(const Context& context, const MoeSpec& spec, const WeightSource& source,
                const activation::Activation& activation, const Float64Matrix& hidden,
                ReferenceResult& result) {
  if (spec.shared.mode == SharedMode::kNone) return;
  const int64_t width = spec.hidden_size;
  const Mlp mlp =
      read_mlp(source, WeightRole::kSharedGate, WeightRole::kSharedUp, WeightRole::kSharedDown, 0);
  Float64Matrix gate;
  const bool gated = spec.shared.mode == SharedMode::kSigmoidGate;
  if (gated) gate = read_float64(source, WeightRole::kSharedExpertGate, 0);
  result.shared.assign(static_cast<size_t>(hidden.rows * width), 0.0);
  cpu::parallel_for_throwing(
      context.executor(), hidden.rows, 1, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t token = begin; token < end; ++token) {
          double* row = result.shared.data() + token * width;
          run_mlp(mlp, activation, hidden.row(token), row);
          if (!gated) continue;
          const double scale = 1.0 / (1.0 + std::exp(-dot(gate.row(0), hidden.row(token), width)));
          for (int64_t h = 0; h < width; ++h) row[h] *= scale;
        }
      });
}

}  // namespace

ReferenceResult reference_forward(const Context& context, const MoeSpec& spec,
                                  const WeightSource& source, const ReferenceArgs& args) {
  validate(spec);
  check_source(spec, source);
  if (args.hidden.shape.rank() != 2 || args.hidden.shape[1] != spec.hidden_size) {
    throw Error(ErrorCode::kShape, {.what = "an argument has the wrong shape",
                                    .tensor = "hidden",
                                    .expected = "[T, " + std::to_string(spec.hidden_size) + "]",
                                    .found = args.hidden.shape.to_string()});
  }
  const activation::Activation activation = activation::parse_activation(spec.activation);
  const Float64Matrix hidden = to_float64(args.hidden);
  ReferenceResult result;
  route(spec, source, args, hidden, result);
  run_routed(context, spec, source, activation, hidden, result);
  run_shared(context, spec, source, activation, hidden, result);
  result.output = result.routed;
  for (size_t index = 0; index < result.shared.size(); ++index) {
    result.output[index] += result.shared[index];
  }
  return result;
}

}  // namespace conclave::inline v0
