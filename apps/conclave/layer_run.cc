#include "layer_run.h"

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

// The three matrices of one expert.
double expert_elements(int64_t hidden_size, int64_t intermediate_size) {
  return 3.0 * static_cast<double>(hidden_size) * static_cast<double>(intermediate_size);
}

}  // namespace

LayerRun run_layer(const MoeLayer& layer, const LayerInput& input, int32_t repetitions) {
  const MoeSpec& spec = layer.spec();
  const int64_t num_tokens = input.num_tokens();
  LayerRun run;
  run.output = Tensor(input.hidden.dtype, {num_tokens, spec.hidden_size});
  run.topk_ids = Tensor(DType::kI32, {num_tokens, spec.top_k});
  run.topk_weights = Tensor(DType::kF32, {num_tokens, spec.top_k});
  run.expert_load.assign(static_cast<size_t>(spec.num_experts), 0);

  ForwardArgs args{.hidden = input.hidden,
                   .router_logits = input.router_logits,
                   .topk_ids = input.topk_ids,
                   .topk_weights = input.topk_weights,
                   .out = run.output.view()};
  ForwardArgs capture = args;
  if (input.topk_ids.empty()) {
    run.logits = Tensor(DType::kF32, {num_tokens, spec.num_experts});
    capture.captured_logits = run.logits.view();
  }
  capture.captured_ids = run.topk_ids.view();
  capture.captured_weights = run.topk_weights.view();
  capture.expert_load = run.expert_load;
  layer.forward(capture);

  std::vector<double> times_ms;
  for (int32_t i = 0; i < repetitions && num_tokens > 0; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    layer.forward(args);
    const auto end = std::chrono::steady_clock::now();
    times_ms.push_back(std::chrono::duration<double, std::milli>(end - begin).count());
  }
  run.median_ms = median(std::move(times_ms));
  return run;
}

double expert_bytes(const MoeSpec& spec) {
  return expert_elements(spec.hidden_size, spec.intermediate_size) *
         static_cast<double>(byte_size(spec.weight_dtype));
}

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
  work.flops = 2.0 * static_cast<double>(work.rows) *
               expert_elements(spec.hidden_size, spec.intermediate_size);
  work.weight_bytes = static_cast<double>(work.experts_hit) * expert_bytes(spec);
  if (spec.shared.mode != SharedMode::kNone && num_tokens > 0) {
    const double shared = expert_elements(spec.hidden_size, spec.shared.intermediate_size);
    work.flops += 2.0 * static_cast<double>(num_tokens) * shared;
    work.weight_bytes += shared * static_cast<double>(byte_size(spec.weight_dtype));
  }
  return work;
}

}  // namespace conclave::tool
