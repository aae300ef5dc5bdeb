// Layers on a GPU with two adapters, held to float64.
#pragma once

#include "core/weight_types.h"
#include "device_layer.h"
#include "layer/random_adapter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace conclave::testing {

inline DType rows_of(const MoeSpec& spec) {
  return is_plain(spec.weight_dtype) ? spec.weight_dtype : DType::kBF16;
}

// A layer with two adapters; tokens have none, the first or the second in turn.
class AdaptedLayer {
 public:
  AdaptedLayer(const MoeSpec& spec, const AdapterChoice& first, const AdapterChoice& second,
               const LayerOptions& options = {}, const ParallelSpec& parallel = {})
      : AdaptedLayer(spec, make_synthetic_source(spec, 11), first, second, options, parallel) {}
  AdaptedLayer(const MoeSpec& spec, std::unique_ptr<WeightSource> source,
               const AdapterChoice& first, const AdapterChoice& second, LayerOptions options = {},
               const ParallelSpec& parallel = {})
      : adapters_{random_adapter(spec, first, 900), random_adapter(spec, second, 9000)} {
    options.max_adapter_rank = static_cast<int32_t>(std::max(first.rank, second.rank));
    owned_.emplace(spec, std::move(source), options, parallel);
    for (const LoraAdapter& adapter : adapters_) ids_.push_back(owned_->layer.add_adapter(adapter));
  }

  DeviceLayer& owned() { return *owned_; }
  MoeLayer& layer() { return owned_->layer; }
  const std::vector<LoraAdapter>& adapters() const { return adapters_; }
  const std::vector<int32_t>& ids() const { return ids_; }

  LayerOutput run(const Tensor& hidden, const Tensor& ids, DType out = DType::kF32) {
    DeviceForward forward(*owned_, hidden.view(), out);
    const DeviceTensor on_device = owned_->queue.upload(ids.view());
    forward.args.adapter_ids = on_device.const_view();
    forward.capture_routing();
    forward.enqueue();
    return forward.output();
  }
  LayerOutput run(const Tensor& hidden, int32_t adapter, DType out = DType::kF32) {
    DeviceForward forward(*owned_, hidden.view(), out);
    forward.args.adapter = adapter;
    forward.capture_routing();
    forward.enqueue();
    return forward.output();
  }

  // The worst token's, of rows that have the first adapter, none and the second in turn.
  double error_of(const Tensor& hidden, const LayerOutput& output) {
    const Tensor places = id_tensor(hidden.shape()[0], {0, -1, 1});
    LayerResult result = output.result(hidden.const_view());
    result.adapters = adapters_;
    result.adapter_ids = places.view();
    result.code_ambiguity = kTensorCoreCodeAmbiguity;
    const StageCheck check = compare(result);
    EXPECT_EQ(check.routing_mismatches, 0);
    // An oracle without the adapters must see a difference: they are not small.
    result.adapters = {};
    result.adapter_ids = {};
    EXPECT_GT(compare(result).worst_token_error, 0.04);
    return check.worst_token_error;
  }
  Tensor hidden(int64_t tokens) {
    const MoeSpec& spec = layer().spec();
    return random_tensor(rows_of(spec), tokens, spec.hidden_size, 3);
  }
  LayerOutput run_in_turn(const Tensor& hidden, DType out_dtype = DType::kF32) {
    return run(hidden, id_tensor(hidden.shape()[0], {ids_[0], -1, ids_[1]}), out_dtype);
  }
  double worst_error(int64_t tokens, DType out_dtype = DType::kF32) {
    const Tensor rows = hidden(tokens);
    return error_of(rows, run_in_turn(rows, out_dtype));
  }

 private:
  StageCheck compare(const LayerResult& result) {
    return check_against_reference(owned_->host, layer().spec(), *owned_->source, result);
  }

  std::vector<LoraAdapter> adapters_;
  std::optional<DeviceLayer> owned_;
  std::vector<int32_t> ids_;
};

inline double bar_of(const MoeSpec& spec, DType out = DType::kF32) {
  return accuracy_bar(spec.weight_dtype, out);
}

}  // namespace conclave::testing
