// Layers with weights of any format of codes.
#pragma once

#include "quant/weight_format.h"
#include "support/layer_fixture.h"

#include <vector>

namespace conclave::testing {

inline MoeSpec coded_spec(DType weights, int64_t experts, int64_t top_k, int64_t hidden,
                          int64_t inner, const QuantSpec& quant) {
  MoeSpec spec = make_spec(experts, top_k, hidden, inner, weights);
  spec.quant = quant;
  return spec;
}
inline MoeSpec e4m3_spec(int64_t experts, int64_t top_k, int64_t hidden, int64_t inner,
                         const QuantSpec& quant) {
  return coded_spec(DType::kF8E4M3, experts, top_k, hidden, inner, quant);
}

inline std::vector<DType> coded_types() {
  std::vector<DType> types;
  const auto catalog = quant::format_catalog();
  for (const quant::WeightFormat& format : catalog.rows()) {
    if (format.codes != nullptr) types.push_back(format.element);
  }
  return types;
}

// Those whose weights need scales alone.
inline std::vector<DType> types_without_zeros() {
  std::vector<DType> types = coded_types();
  std::erase_if(types, [](DType type) {
    return !quant::format_of(type).takes({.weights = WeightScale::kChannel});
  });
  return types;
}

}  // namespace conclave::testing
