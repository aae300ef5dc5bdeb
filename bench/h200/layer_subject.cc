#include "layer_subject.h"

#include "cuda/check.h"
#include "cuda/stream.h"
#include "logits.h"
#include "support/cuda/graph_timer.h"
#include "support/cuda/problem_layer.h"

#include "conclave/interop/cuda.h"

#include <algorithm>
#include <span>

namespace conclave::bench {

namespace {

constexpr size_t kCounterBytes = 256;  // at the start of a workspace

}  // namespace

LayerSubject::LayerSubject(const Context& context, testing::CudaProblem& problem,
                           int64_t max_tokens, Determinism determinism)
    : problem_(problem),
      layer_(MoeLayer::create(context, testing::layer_spec(problem.options()),
                              *testing::layer_source(problem),
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
