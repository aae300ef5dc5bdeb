// Adapters with random factors, for layers of any spec.
#pragma once

#include "core/part_spec.h"
#include "support/layer_fixture.h"

#include "conclave/lora.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace conclave::testing {

struct AdapterChoice {
  int64_t rank = 16;
  DType dtype = DType::kF32;
  double size = 0.5;  // what is added has it, where rows have values around 1
  // Experts whose number divided by this leaves a remainder are not adapted.
  int64_t every = 1;
  bool fused = false;  // gate and up share `a`
};

// Activations amplify errors of large sums: what is added has a size of its own.
class AdapterMaker {
 public:
  AdapterMaker(const AdapterChoice& choice, uint64_t seed)
      : choice_(choice), seed_(seed), kept_(std::make_shared<std::vector<Tensor>>()) {
    kept_->reserve(4096);
    made_.name = "random" + std::to_string(seed);
  }

  void add_mlp(WeightMlp mlp, int64_t count, int64_t hidden, int64_t inner, bool gated) {
    for (int64_t expert = 0; expert < count; expert += choice_.every) {
      const ConstTensorView a = tensor(choice_.rank, hidden);
      if (gated) add(mlp, WeightMatrix::kGate, expert, a, inner);
      add(mlp, WeightMatrix::kUp, expert, choice_.fused ? a : tensor(choice_.rank, hidden), inner);
      add(mlp, WeightMatrix::kDown, expert, tensor(choice_.rank, inner), hidden);
    }
  }
  LoraAdapter take() {
    made_.memory = kept_;
    return std::move(made_);
  }

 private:
  ConstTensorView tensor(int64_t rows, int64_t cols) {
    kept_->push_back(random_tensor(choice_.dtype, rows, cols, ++seed_));
    return kept_->back().const_view();
  }
  void add(WeightMlp mlp, WeightMatrix matrix, int64_t expert, const ConstTensorView& a,
           int64_t out) {
    made_.factors.push_back({.mlp = mlp,
                             .matrix = matrix,
                             .expert = expert,
                             .a = a,
                             .b = tensor(out, choice_.rank),
                             .scale = choice_.size / std::sqrt(choice_.rank * a.shape[1])});
  }

  AdapterChoice choice_;
  uint64_t seed_;
  std::shared_ptr<std::vector<Tensor>> kept_;
  LoraAdapter made_;
};

inline LoraAdapter random_adapter(const MoeSpec& spec, const AdapterChoice& choice,
                                  uint64_t seed = 900) {
  AdapterMaker maker(choice, seed);
  maker.add_mlp(WeightMlp::kRouted, spec.num_experts, expert_width(spec), spec.intermediate_size,
                is_gated(spec.activation));
  if (spec.shared.mode != SharedMode::kNone) {
    maker.add_mlp(WeightMlp::kShared, spec.shared.count, spec.hidden_size,
                  spec.shared.intermediate_size,
                  is_gated(activation_or_routed(spec.shared.activation, spec)));
  }
  return maker.take();
}

// Ids [T]: token t has ids[t % size].
inline Tensor id_tensor(int64_t tokens, const std::vector<int32_t>& ids) {
  Tensor tensor(DType::kI32, {tokens});
  for (int64_t t = 0; t < tokens; ++t) {
    tensor.as<int32_t>()[t] = ids[static_cast<size_t>(t) % ids.size()];
  }
  return tensor;
}

}  // namespace conclave::testing
