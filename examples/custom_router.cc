// Adds a custom router to a context under a name, then uses it like a built-in one.
#include "conclave/conclave.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <vector>

namespace {

using conclave::DType;

constexpr int64_t kExperts = 8, kTopK = 2, kHidden = 64, kTokens = 6;

// Token t uses experts t, t + 1, ... (mod E), each weighted by the sigmoid of its own logit.
class RotatingRouter final : public conclave::Router {
 public:
  explicit RotatingRouter(int64_t top_k) : top_k_(top_k) {}

  conclave::RouterStats route(const conclave::RouterInput& input,
                              const conclave::RouterOutput& output,
                              conclave::Executor& /*executor*/) const override {
    for (int64_t token = 0; token < input.num_tokens; ++token) {
      for (int64_t slot = 0; slot < top_k_; ++slot) {
        const int64_t expert = (token + slot) % input.num_experts;
        const float logit = input.logits[token * input.num_experts + expert];
        output.topk_ids[token * top_k_ + slot] = static_cast<int32_t>(expert);
        output.topk_weights[token * top_k_ + slot] = 1.0F / (1.0F + std::exp(-logit));
      }
    }
    return {};
  }

 private:
  int64_t top_k_;
};

int run() {
  conclave::MoeSpec spec;
  spec.num_experts = kExperts;
  spec.top_k = kTopK;
  spec.hidden_size = kHidden;
  spec.intermediate_size = kHidden;
  spec.router.name = "rotating";

  conclave::Context context;
  context.add_router("rotating", [](const conclave::MoeSpec& layer_spec) {
    return std::make_unique<RotatingRouter>(layer_spec.top_k);
  });
  const auto source = conclave::make_synthetic_source(spec, /*seed=*/1);
  const auto layer = conclave::MoeLayer::create(context, spec, *source, {.max_tokens = kTokens});

  conclave::Tensor hidden(DType::kBF16, {kTokens, kHidden}), out(DType::kBF16, {kTokens, kHidden});
  conclave::Tensor ids(DType::kI32, {kTokens, kTopK});
  conclave::fill_random(hidden.view(), 2);
  std::vector<int64_t> load(kExperts);
  layer.forward({.hidden = hidden.const_view(),
                 .out = out.view(),
                 .captured_ids = ids.view(),
                 .expert_load = load});

  bool rotated = true;
  for (int64_t token = 0; token < kTokens; ++token) {
    rotated = rotated && ids.as<int32_t>()[token * kTopK] == token % kExperts;
  }
  std::printf("router %s: token 5 went to experts %d and %d; expert 1 served %lld tokens\n",
              layer.plan().router.c_str(), ids.as<int32_t>()[10], ids.as<int32_t>()[11],
              static_cast<long long>(load[1]));
  return rotated && load[1] == 2 ? 0 : 1;
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
