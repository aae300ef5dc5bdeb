#include "layer_subject.h"

#include "cuda/check.h"
#include "cuda/stream.h"
#include "logits.h"
#include "support/cuda/graph_timer.h"

#include "conclave/interop/cuda.h"
#include "conclave/weights.h"

#include <algorithm>
#include <span>

namespace conclave::bench {

namespace {

constexpr size_t kCounterBytes = 256;  // what a workspace starts with

MoeSpec spec_of(const testing::CudaProblemOptions& o) {
  MoeSpec spec;
  spec.num_experts = o.num_experts;
  spec.top_k = o.top_k;
  spec.hidden_size = o.hidden_size;
  spec.intermediate_size = o.intermediate_size;
  spec.weight_dtype = o.weight_dtype;
  spec.quant = o.quant;
  spec.activation = o.activation;
  spec.has_bias = o.has_bias;
  spec.has_gate = false;
  return spec;
}

int64_t blocks(int64_t n) { return (n + 127) / 128; }

std::unique_ptr<WeightSource> source_of(const testing::CudaProblem& problem) {
  const testing::CudaProblemOptions& o = problem.options();
  const experts::DeviceExperts w = problem.weights();
  const int64_t e = o.num_experts;
  const int64_t h = o.hidden_size;
  const int64_t i = o.intermediate_size;
  ExpertWeights weights{.gate_up = {w.gate_up, o.weight_dtype, {e, 2 * i, h}},
                        .down = {w.down, o.weight_dtype, {e, h, i}}};
  weights.memory = MemoryKind::kDevice;
  if (o.has_bias) {
    weights.gate_up_bias = {w.gate_up_bias, DType::kF32, {e, 2 * i}};
    weights.down_bias = {w.down_bias, DType::kF32, {e, h}};
  }
  if (o.quant.weights == WeightScale::kBlock) {
    weights.gate_up_scale = {w.gate_up_scale, DType::kF32, {e, 2 * blocks(i), blocks(h)}};
    weights.down_scale = {w.down_scale, DType::kF32, {e, blocks(h), blocks(i)}};
  }
  return make_pointer_source(weights);
}

}  // namespace

LayerSubject::LayerSubject(const Context& context, testing::CudaProblem& problem,
                           int64_t max_tokens, Determinism determinism)
    : problem_(problem),
      layer_(MoeLayer::create(context, spec_of(problem.options()), *source_of(problem),
                              {.max_tokens = max_tokens, .determinism = determinism})),
      workspace_memory_(layer_.workspace_bytes()) {
  workspace_.emplace(context, std::span(workspace_memory_.data(), workspace_memory_.bytes()));
}

void LayerSubject::forward(RoutingInput input, int32_t routing, CUstream_st* stream) {
  const testing::CudaProblemOptions& o = problem_.options();
  const DeviceRows hidden = problem_.hidden();
  const int64_t t = o.num_tokens;
  ForwardArgs args;
  args.hidden = {hidden.data, hidden.dtype, {t, o.hidden_size}, hidden.row_stride};
  if (input == RoutingInput::kIds) {
    args.topk_ids = {problem_.topk_ids(routing), DType::kI32, {t, o.top_k}};
    args.topk_weights = {problem_.topk_weights(routing), DType::kF32, {t, o.top_k}};
  } else {
    args.router_logits = {logits_.as<float>() + int64_t{routing} * t * o.num_experts,
                          DType::kF32,
                          {t, o.num_experts}};
  }
  args.out = {out_->data(), hidden.dtype, {t, o.hidden_size}, problem_.row_stride()};
  args.workspace = &*workspace_;
  args.stream = to_stream(stream);
  layer_.forward(args);
}

Measurement LayerSubject::measure(RoutingInput input, double seconds) {
  const testing::CudaProblemOptions& o = problem_.options();
  if (input == RoutingInput::kLogits) logits_ = make_logits(problem_);
  const DType dtype = problem_.row_dtype();
  out_.emplace(static_cast<size_t>(o.num_tokens * problem_.row_stride() * byte_size(dtype)));
  const auto enqueue = [&](int32_t routing, CUstream_st* stream) {
    forward(input, routing, stream);
  };

  Measurement result{.routings = o.routings};
  const double guess =
      testing::time_graph({.inputs = o.routings, .replays = 1}, enqueue) * 1e-6 * o.routings;
  result.replays = static_cast<int32_t>(std::clamp(seconds / guess, 3.0, 30.0));
  result.microseconds =
      testing::time_graph({.inputs = o.routings, .replays = result.replays}, enqueue);

  const cuda::OwnedStream stream = cuda::make_stream();
  out_->poison(stream.get());
  workspace_memory_.poison(stream.get());
  workspace_memory_.clear(kCounterBytes, stream.get());
  forward(input, 0, stream.get());
  cuda::check(cudaStreamSynchronize(stream.get()), "forward");
  result.damage = out_->damage() + workspace_memory_.damage();
  result.errors = problem_.check_tokens({.data = out_->data(),
                                         .rows = o.num_tokens,
                                         .cols = o.hidden_size,
                                         .stride = problem_.row_stride(),
                                         .dtype = dtype});
  return result;
}

}  // namespace conclave::bench
