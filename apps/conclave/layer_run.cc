#include "layer_run.h"

#include "device_run.h"
#include "interrupt.h"
#include "output/numbers.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <numeric>

namespace conclave::tool {
namespace {

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

// Elements of all matrices of one MLP: gate and up, or up alone without a gate, and down.
double mlp_elements(const ActivationSpec& activation, int64_t width, int64_t intermediate_size) {
  const double matrices = is_gated(activation) ? 3.0 : 2.0;
  return matrices * static_cast<double>(width) * static_cast<double>(intermediate_size);
}

double routed_elements(const MoeSpec& spec) {
  return mlp_elements(spec.activation, expert_width(spec), spec.intermediate_size);
}

// Elements that every token uses: shared experts, latent projections, the residual MLP.
double common_elements(const MoeSpec& spec) {
  const auto or_routed = [&](const ActivationSpec& own) -> const ActivationSpec& {
    return own.name.empty() ? spec.activation : own;
  };
  double elements = 0;
  if (spec.shared.mode != SharedMode::kNone) {
    elements += static_cast<double>(spec.shared.count) *
                mlp_elements(or_routed(spec.shared.activation), spec.hidden_size,
                             spec.shared.intermediate_size);
  }
  if (spec.residual.intermediate_size > 0) {
    elements += mlp_elements(or_routed(spec.residual.activation), spec.hidden_size,
                             spec.residual.intermediate_size);
  }
  return elements +
         2.0 * static_cast<double>(spec.latent.size) * static_cast<double>(spec.hidden_size);
}

void run_on_host(const MoeLayer& layer, const LayerInput& input, int32_t repetitions,
                 LayerRun& run) {
  ForwardArgs args{.hidden = input.hidden,
                   .router_logits = input.router_logits,
                   .topk_ids = input.topk_ids,
                   .topk_weights = input.topk_weights,
                   .router_input = input.router_input,
                   .residual_input = input.residual_input,
                   .token_ids = input.token_ids,
                   .adapter = input.adapter != nullptr ? layer.adapters().front().id : kNoAdapter,
                   .top_k = input.top_k,
                   .banned_experts = input.banned_experts,
                   .expert_budget = input.expert_budget,
                   .out = run.output.view(),
                   .rank_tokens = input.rank_tokens};
  ForwardArgs capture = args;
  if (run.has_logits()) capture.captured_logits = run.logits.view();
  capture.captured_ids = run.topk_ids.view();
  capture.captured_weights = run.topk_weights.view();
  capture.expert_load = run.expert_load;
  layer.forward(capture);

  std::vector<double> times_ms;
  for (int32_t i = 0; i < repetitions; ++i) {
    check_interrupt();
    const auto begin = std::chrono::steady_clock::now();
    layer.forward(args);
    const auto end = std::chrono::steady_clock::now();
    times_ms.push_back(std::chrono::duration<double, std::milli>(end - begin).count());
  }
  run.median_ms = median(std::move(times_ms));
}

}  // namespace

WeightMemory weight_memory(const Plan& plan) {
  WeightMemory memory{.packed_bytes = plan.packed_bytes, .in_place_bytes = plan.in_place_bytes};
  for (const PlanRow& row : plan.rows) {
    if (row.table != "weights" || row.chosen) continue;
    memory.packed_because.push_back(row.name + ": " + row.reason);
  }
  return memory;
}

std::string memory_text(const WeightMemory& memory) {
  const std::string packed = bytes_text(memory.packed_bytes) + " packed";
  if (memory.in_place_bytes == 0) return packed;
  return fmt::format("{} read in place, {}", bytes_text(memory.in_place_bytes), packed);
}

LayerRun run_layer(const Context& context, const MoeLayer& layer, const LayerInput& input,
                   int32_t repetitions) {
  const MoeSpec& spec = layer.spec();
  const int64_t num_tokens = input.num_tokens();
  LayerRun run;
  run.output = Tensor(input.hidden.dtype, {num_tokens, spec.hidden_size});
  run.topk_ids = Tensor(DType::kI32, {num_tokens, num_slots(spec)});
  run.topk_weights = Tensor(DType::kF32, {num_tokens, num_slots(spec)});
  if (input.topk_ids.empty()) run.logits = Tensor(DType::kF32, {num_tokens, num_logits(spec)});
  run.expert_load.assign(static_cast<size_t>(spec.num_experts), 0);
  if (layer.plan().isa.empty()) {
    run_on_device(context, layer, input, repetitions, run);
  } else {
    run_on_host(layer, input, repetitions, run);
  }
  return run;
}

// The scales are left out.
static double bytes_per_weight(const MoeSpec& spec) {
  return static_cast<double>(bit_size(spec.weight_dtype)) / 8;
}

double expert_bytes(const MoeSpec& spec) { return routed_elements(spec) * bytes_per_weight(spec); }

LayerWork layer_work(const MoeSpec& spec, int64_t num_tokens,
                     std::span<const int64_t> expert_load) {
  LayerWork work;
  work.rows = std::accumulate(expert_load.begin(), expert_load.end(), int64_t{0});
  work.experts_hit =
      std::count_if(expert_load.begin(), expert_load.end(), [](int64_t rows) { return rows > 0; });
  if (work.rows > 0) {
    const int64_t largest = *std::max_element(expert_load.begin(), expert_load.end());
    work.balance = static_cast<double>(largest) * static_cast<double>(spec.num_experts) /
                   static_cast<double>(work.rows);
  }
  work.flops = 2.0 * static_cast<double>(work.rows) * routed_elements(spec);
  work.weight_bytes = static_cast<double>(work.experts_hit) * expert_bytes(spec);
  if (num_tokens > 0) {
    const double common = common_elements(spec);
    work.flops += 2.0 * static_cast<double>(num_tokens) * common;
    work.weight_bytes += common * bytes_per_weight(spec);
  }
  return work;
}

}  // namespace conclave::tool
