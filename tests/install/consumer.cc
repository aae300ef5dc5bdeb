// Code that a user of the installed package writes: a layer over own memory, a forward, an error.
#include <cmath>
#include <conclave/conclave.h>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

namespace {

constexpr int64_t kExperts = 4, kTopK = 2, kHidden = 8, kIntermediate = 4, kTokens = 3;

// Every weight is 1/8 and every input 1, so that each expert computes the same known value.
double expected_output() {
  const double gate = 1.0;  // 8 * 1/8
  return kIntermediate * (gate / (1.0 + std::exp(-gate))) / 8.0;
}

int run() {
  std::vector<float> gate_up(kExperts * 2 * kIntermediate * kHidden, 0.125F);
  std::vector<float> down(kExperts * kHidden * kIntermediate, 0.125F);
  std::vector<float> hidden(kTokens * kHidden, 1.0F), logits(kTokens * kExperts, 0.0F);
  std::vector<float> out(kTokens * kHidden, -1.0F);

  conclave::MoeSpec spec;
  spec.num_experts = kExperts;
  spec.top_k = kTopK;
  spec.hidden_size = kHidden;
  spec.intermediate_size = kIntermediate;
  spec.weight_dtype = conclave::DType::kF32;
  spec.has_gate = false;

  using conclave::DType;
  const auto source = conclave::make_pointer_source(
      {.gate_up = {gate_up.data(), DType::kF32, {kExperts, 2 * kIntermediate, kHidden}},
       .down = {down.data(), DType::kF32, {kExperts, kHidden, kIntermediate}}});
  conclave::Context context(conclave::ContextOptions{.num_threads = 1});
  const auto layer = conclave::MoeLayer::create(context, spec, *source, {.max_tokens = kTokens});
  layer.forward({.hidden = {hidden.data(), DType::kF32, {kTokens, kHidden}},
                 .router_logits = {logits.data(), DType::kF32, {kTokens, kExperts}},
                 .out = {out.data(), DType::kF32, {kTokens, kHidden}}});
  for (const float value : out) {
    if (std::abs(value - expected_output()) > 1e-5) {
      std::fprintf(stderr, "expected %f, found %f\n", expected_output(), double(value));
      return 1;
    }
  }

  // The library's exception type is the same on both sides of the library's boundary.
  try {
    spec.top_k = kExperts + 1;
    conclave::validate(spec);
    return 1;
  } catch (const conclave::Error& error) {
    std::printf("conclave %s: %s\n", conclave::build_info().version, error.what());
  }
  return std::strcmp(conclave::build_info().version, CONCLAVE_VERSION_STRING);
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
