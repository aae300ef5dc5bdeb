#include "support/cuda/problem_layer.h"

namespace conclave::testing {

namespace {

int64_t blocks(int64_t n) { return (n + 127) / 128; }

}  // namespace

MoeSpec layer_spec(const CudaProblemOptions& options) {
  MoeSpec spec;
  spec.num_experts = options.num_experts;
  spec.top_k = options.top_k;
  spec.hidden_size = options.hidden_size;
  spec.intermediate_size = options.intermediate_size;
  spec.weight_dtype = options.weight_dtype;
  spec.quant = options.quant;
  spec.activation = options.activation;
  spec.has_bias = options.has_bias;
  spec.has_gate = false;
  return spec;
}

std::unique_ptr<WeightSource> layer_source(const CudaProblem& problem) {
  const CudaProblemOptions& o = problem.options();
  const experts::DeviceExperts w = problem.weights();
  const int64_t e = o.num_experts;
  const int64_t h = o.hidden_size;
  const int64_t i = o.intermediate_size;
  ExpertWeights weights{.gate_up = {w.gate_up.data, o.weight_dtype, {e, 2 * i, h}},
                        .down = {w.down.data, o.weight_dtype, {e, h, i}}};
  weights.memory = MemoryKind::kDevice;
  if (o.has_bias) {
    weights.gate_up_bias = {w.gate_up.bias, DType::kF32, {e, 2 * i}};
    weights.down_bias = {w.down.bias, DType::kF32, {e, h}};
  }
  if (o.quant.weights == WeightScale::kBlock) {
    weights.gate_up_scale = {w.gate_up.scale, DType::kF32, {e, 2 * blocks(i), blocks(h)}};
    weights.down_scale = {w.down.scale, DType::kF32, {e, blocks(h), blocks(i)}};
  }
  if (o.quant.weights == WeightScale::kChannel) {
    weights.gate_up_scale = {w.gate_up.scale, DType::kF32, {e, 2 * i, 1}};
    weights.down_scale = {w.down.scale, DType::kF32, {e, h, 1}};
  }
  return make_pointer_source(weights);
}

}  // namespace conclave::testing
