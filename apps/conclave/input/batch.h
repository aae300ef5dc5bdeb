// Provides a layer's tokens, from a file or from random numbers.
#pragma once

#include "input/tensor_file.h"
#include "layer_run.h"

#include "conclave/spec.h"
#include "conclave/tensor.h"

#include <cstdint>
#include <optional>
#include <string>

namespace conclave::tool {

// kFile uses topk_ids and topk_weights, or router_logits, of the input file.
enum class RoutingFrom : uint8_t { kGate, kFile };

struct BatchOptions {
  std::string input;   // empty: random numbers
  std::string record;  // in the input file; empty: it has one record per layer
  int64_t random_tokens = 16;
  uint64_t seed = 0;
  RoutingFrom routing = RoutingFrom::kGate;
};

// Owns the tensors that LayerInput views.
struct Batch {
  Tensor hidden;
  std::optional<Tensor> router_logits;
  std::optional<Tensor> topk_ids;
  std::optional<Tensor> topk_weights;
  std::optional<Tensor> router_input;
  std::optional<Tensor> residual_input;
  std::optional<Tensor> token_ids;

  LayerInput view() const;
};

struct BatchShape {
  int64_t num_tokens = 0;
  DType dtype = DType::kF32;
  bool gives_ids = false;  // the layer then computes no logits
};

class BatchSource {
 public:
  explicit BatchSource(BatchOptions options);

  // Throws as load does, without reading data.
  BatchShape check(int64_t layer, const MoeSpec& spec) const;
  Batch load(int64_t layer, const MoeSpec& spec) const;
  // Returns "20 tokens from x.safetensors" for the header.
  std::string describe() const;

 private:
  void load_inputs(int64_t layer, const MoeSpec& spec, Batch& batch) const;
  void load_routing(int64_t layer, const MoeSpec& spec, Batch& batch) const;

  BatchOptions options_;
  std::optional<LayerTensors> file_;
};

}  // namespace conclave::tool
