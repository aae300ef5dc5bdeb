// Creates a layer over weights that the caller owns, routed by logits that the caller computed.
#include "conclave/conclave.h"

#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

namespace {

using conclave::DType;

constexpr int64_t kExperts = 16, kTopK = 4, kHidden = 128, kIntermediate = 96, kTokens = 10;

// Stands in for weights and activations that a real program already has in memory.
std::vector<float> random_matrix(int64_t rows, int64_t cols, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(rows * cols));
  conclave::fill_random({.data = values.data(), .dtype = DType::kF32, .shape = {rows, cols}}, seed);
  return values;
}

int run() {
  conclave::MoeSpec spec;
  spec.num_experts = kExperts;
  spec.top_k = kTopK;
  spec.hidden_size = kHidden;
  spec.intermediate_size = kIntermediate;
  spec.weight_dtype = DType::kF32;
  spec.has_gate = false;  // the caller brings the logits

  const auto gate_up = random_matrix(kExperts * 2 * kIntermediate, kHidden, 1);
  const auto down = random_matrix(kExperts * kHidden, kIntermediate, 2);
  const auto hidden = random_matrix(kTokens, kHidden, 3);
  const auto logits = random_matrix(kTokens, kExperts, 4);
  std::vector<float> out(kTokens * kHidden);

  // The source only points at the weights; `create` packs its own copy, after which they may be
  // freed.
  const auto source = conclave::make_pointer_source(
      {.gate_up = {gate_up.data(), DType::kF32, {kExperts, 2 * kIntermediate, kHidden}},
       .down = {down.data(), DType::kF32, {kExperts, kHidden, kIntermediate}}});
  const conclave::Context context;
  const auto layer = conclave::MoeLayer::create(context, spec, *source, {.max_tokens = kTokens});

  const conclave::ConstTensorView hidden_view{hidden.data(), DType::kF32, {kTokens, kHidden}};
  const conclave::ConstTensorView logits_view{logits.data(), DType::kF32, {kTokens, kExperts}};
  const conclave::TensorView out_view{out.data(), DType::kF32, {kTokens, kHidden}};
  layer.forward({.hidden = hidden_view, .router_logits = logits_view, .out = out_view});

  const auto reference = conclave::reference_forward(
      context, spec, *source, {.hidden = hidden_view, .router_logits = logits_view});
  const double error = conclave::worst(conclave::token_errors(out_view, reference.output));
  const double bar = conclave::accuracy_bar(spec.weight_dtype, DType::kF32);
  std::printf("%lld tokens through %lld experts: worst error %.1e of %.1e allowed\n",
              static_cast<long long>(kTokens), static_cast<long long>(kExperts), error, bar);
  return error <= bar ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
