// Weights of a small layer in memory, whole or of some experts, and scopes of them.
#pragma once

#include "capi/handles.h"
#include "support/layer_fixture.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::testing {

inline constexpr int64_t kExperts = 6;
inline constexpr int64_t kHidden = 40;
inline constexpr int64_t kWidth = 24;
inline constexpr const char* kArraysSpec =
    R"({"num_experts": 6, "top_k": 2, "hidden_size": 40, "intermediate_size": 24,
        "weight_dtype": "BF16"})";

// Weights of some experts in memory, with the handle of a source over them.
struct Arrays {
  Tensor gate_up;
  Tensor down;
  Tensor router;
  Handle<conclave_source> source;

  explicit Arrays(uint64_t seed)
      : gate_up(random_tensor(DType::kBF16, kExperts * 2 * kWidth, kHidden, seed)),
        down(random_tensor(DType::kBF16, kExperts * kHidden, kWidth, seed + 1)),
        router(random_tensor(DType::kF32, kExperts, kHidden, seed + 2)),
        source(source_of(nullptr, kExperts, {"gate_up", "down", "router"})) {}

  // The tensors of that name, of `count` experts from the first on.
  Handle<conclave_source> source_of(const conclave_source_options* options, int64_t count,
                                    const std::vector<std::string>& names,
                                    int64_t first = 0) const {
    std::vector<conclave_tensor> views(3);
    std::vector<conclave_named_tensor> named;
    for (const std::string& name : names) {
      conclave_tensor& view = views[named.size()];
      const Tensor& of = name == "gate_up" ? gate_up : name == "down" ? down : router;
      view = tensor_of(of.const_view());
      if (name != "router") {
        const int64_t rows = of.shape()[0] / kExperts;
        const int64_t cols = of.shape()[1];
        view.data = static_cast<char*>(view.data) + first * rows * cols * 2;
        view.rank = 3;
        view.shape[0] = count;
        view.shape[1] = rows;
        view.shape[2] = cols;
      }
      named.push_back({name.c_str(), &view});
    }
    return make<conclave_source>(&conclave_source_from_tensors, named.data(), named.size(),
                                 options);
  }
};

inline conclave_refit_scope scope_of(const std::vector<int32_t>& experts,
                                     const std::vector<const char*>& tensors = {}) {
  auto scope = sized<conclave_refit_scope>();
  scope.experts = experts.data();
  scope.experts_count = experts.size();
  scope.tensors = tensors.data();
  scope.tensors_count = tensors.size();
  return scope;
}

}  // namespace conclave::testing
