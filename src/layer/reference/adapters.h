// Adapters in float64: the factors of one expert, and which of them a token has.
#pragma once

#include "layer/reference/float64_matrix.h"

#include "conclave/lora.h"
#include "conclave/reference.h"
#include "conclave/weights.h"

#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0 {

// Without values there are no factors.
struct Float64Factors {
  Float64Matrix a;
  Float64Matrix b;
  double scale = 1;

  // The terms scale * a . x; none without factors.
  std::vector<double> terms(const double* x) const;
  // `terms` add this to row `row` of the product.
  double delta(const std::vector<double>& terms, int64_t row) const;
};

struct Float64Adapter {
  Float64Factors gate;
  Float64Factors up;
  Float64Factors down;
};

class ReferenceAdapters {
 public:
  explicit ReferenceAdapters(const ReferenceArgs& args)
      : adapters_(args.adapters), ids_(args.adapter_ids) {}

  // The factors of one expert, an entry for each adapter.
  std::vector<Float64Adapter> of_expert(WeightMlp mlp, int64_t expert) const;
  // The entry that a token has; null without an adapter.
  const Float64Adapter* of_token(const std::vector<Float64Adapter>& expert, int64_t token) const;

 private:
  std::span<const LoraAdapter> adapters_;
  ConstTensorView ids_;
};

}  // namespace conclave::inline v0
