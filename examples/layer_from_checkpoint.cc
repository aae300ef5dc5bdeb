// Compares every MoE layer of a Hugging Face model directory with float64 on random inputs.
#include "conclave/conclave.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>

namespace {

using conclave::DType;

constexpr int64_t kTokens = 8;

// The worst relative error of any token of this layer.
double worst_error(const conclave::Context& context, const conclave::CheckpointLayer& info,
                   const conclave::WeightSource& source) {
  const conclave::MoeSpec& spec = info.spec;
  // The inputs have the model's own type, as in the model itself.
  conclave::Tensor hidden(spec.weight_dtype, {kTokens, spec.hidden_size});
  conclave::Tensor out(DType::kF32, {kTokens, spec.hidden_size});
  conclave::Tensor ids(DType::kI32, {kTokens, spec.top_k});
  conclave::Tensor weights(DType::kF32, {kTokens, spec.top_k});
  conclave::fill_random(hidden.view(), static_cast<uint64_t>(info.index));

  const auto layer = conclave::MoeLayer::create(context, spec, source, {.max_tokens = kTokens});
  layer.forward({.hidden = hidden.const_view(),
                 .out = out.view(),
                 .captured_ids = ids.view(),
                 .captured_weights = weights.view()});

  // The reference uses the layer's own choice of experts, so that a near tie in the gate cannot
  // look like an error.
  const auto reference = conclave::reference_forward(context, spec, source,
                                                     {.hidden = hidden.const_view(),
                                                      .topk_ids = ids.const_view(),
                                                      .topk_weights = weights.const_view()});
  return conclave::worst(conclave::token_errors(out.const_view(), reference.output));
}

int run(const char* directory) {
  const auto checkpoint = conclave::Checkpoint::open(directory);
  const conclave::Context context;
  bool all_within = true;
  for (const conclave::CheckpointLayer& info : checkpoint.layers()) {
    if (!info.support) {
      std::printf("layer %lld: not run: %s\n", static_cast<long long>(info.index),
                  info.support.reason().c_str());
      continue;
    }
    const auto source = checkpoint.layer_source(info.index);
    const double error = worst_error(context, info, *source);
    const double bar = conclave::accuracy_bar(info.spec.weight_dtype, DType::kF32);
    std::printf("%s layer %lld: %lld experts, worst error %.1e of %.1e allowed\n",
                checkpoint.model_type().c_str(), static_cast<long long>(info.index),
                static_cast<long long>(info.spec.num_experts), error, bar);
    all_within = all_within && error <= bar;
  }
  return all_within && !checkpoint.layers().empty() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: layer_from_checkpoint MODEL_DIR\n");
    return 2;
  }
  try {
    return run(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
