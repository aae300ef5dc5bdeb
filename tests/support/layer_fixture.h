// Small layers with random weights and inputs, and the forwards and comparisons that tests need.
#pragma once

#include "support/drawn_source.h"

#include "conclave/error.h"
#include "conclave/layer.h"
#include "conclave/placement.h"
#include "conclave/reference.h"
#include "conclave/synthetic.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace conclave::testing {

inline MoeSpec make_spec(int64_t experts, int64_t top_k, int64_t hidden, int64_t intermediate,
                         DType weight_dtype) {
  MoeSpec spec;
  spec.num_experts = experts;
  spec.top_k = top_k;
  spec.hidden_size = hidden;
  spec.intermediate_size = intermediate;
  spec.weight_dtype = weight_dtype;
  return spec;
}

inline Tensor random_tensor(DType dtype, int64_t rows, int64_t cols, uint64_t seed) {
  Tensor tensor(dtype, {rows, cols});
  fill_random(tensor.view(), seed);
  return tensor;
}

// Everything that one forward by the layer's own gate produces.
struct LayerOutput {
  Tensor out;
  Tensor logits;
  Tensor ids;
  Tensor weights;

  LayerResult result(const ConstTensorView& hidden) const {
    return {.hidden = hidden,
            .logits = logits.view(),
            .topk_ids = ids.view(),
            .topk_weights = weights.view(),
            .output = out.view()};
  }
};

inline LayerOutput run_layer(const MoeLayer& layer, const ConstTensorView& hidden, DType out_dtype,
                             ForwardArgs args = {}) {
  const MoeSpec& spec = layer.spec();
  const int64_t tokens = hidden.shape[0];
  LayerOutput output{.out = Tensor(out_dtype, {tokens, spec.hidden_size}),
                     .logits = Tensor(DType::kF32, {tokens, num_logits(spec)}),
                     .ids = Tensor(DType::kI32, {tokens, num_slots(spec)}),
                     .weights = Tensor(DType::kF32, {tokens, num_slots(spec)})};
  args.hidden = hidden;
  args.out = output.out.view();
  if (args.topk_ids.empty()) args.captured_logits = output.logits.view();
  args.captured_ids = output.ids.view();
  args.captured_weights = output.weights.view();
  layer.forward(args);
  return output;
}

// A layer with its context and weights, kept alive together.
struct OwnedLayer {
  std::unique_ptr<Context> context;
  std::unique_ptr<WeightSource> source;
  MoeLayer layer;
};

inline OwnedLayer make_layer(const MoeSpec& spec, const LayerOptions& options = {},
                             ContextOptions context_options = {}, uint64_t seed = 11) {
  if (context_options.num_threads == 0) context_options.num_threads = 2;
  auto context = std::make_unique<Context>(std::move(context_options));
  auto source = draw_source(spec, seed);
  MoeLayer layer = MoeLayer::create(*context, spec, *source, options);
  return {std::move(context), std::move(source), std::move(layer)};
}

inline std::vector<std::byte> row_bytes(const Tensor& tensor, int64_t row) {
  const size_t bytes = tensor.size_bytes() / static_cast<size_t>(tensor.shape()[0]);
  const std::byte* begin = tensor.as<std::byte>() + static_cast<size_t>(row) * bytes;
  return {begin, begin + bytes};
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() &&
         std::memcmp(a.as<std::byte>(), b.as<std::byte>(), a.size_bytes()) == 0;
}

// Returns the rows `rows` of `tensor`, in that order.
inline Tensor gather_rows(const Tensor& tensor, const std::vector<int64_t>& rows) {
  Tensor gathered(tensor.dtype(), {static_cast<int64_t>(rows.size()), tensor.shape()[1]});
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::vector<std::byte> row = row_bytes(tensor, rows[i]);
    std::memcpy(gathered.as<std::byte>() + i * row.size(), row.data(), row.size());
  }
  return gathered;
}

// A layer of one kind of arithmetic; nothing where this CPU or the weights have no such.
inline std::optional<MoeLayer> layer_of(const Context& context, const MoeSpec& spec,
                                        const WeightSource& source, const std::string& arithmetic,
                                        const ParallelSpec& parallel = {}) {
  try {
    return MoeLayer::create(context, spec, source, {.arithmetic = arithmetic}, parallel);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    return std::nullopt;
  }
}

// The instruction sets that this machine can run.
inline std::vector<std::string> usable_isas() {
  std::vector<std::string> names;
  for (const char* name : {"scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"}) {
    try {
      const Context context({.num_threads = 1, .isa = name});
      names.emplace_back(name);
    } catch (const Error&) {
      // `conclave doctor` reports this; tests run the sets that exist.
    }
  }
  return names;
}

// Returns the code of the Error that `action` throws; ErrorCode{0} if it throws none.
template <class Action>
ErrorCode code_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode{0};
}

}  // namespace conclave::testing
