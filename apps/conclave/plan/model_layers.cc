#include "plan/model_layers.h"

#include "output/numbers.h"

#include "conclave/dtype.h"
#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>

namespace conclave::tool {
namespace {

const ActivationSpec& or_routed(const ActivationSpec& own, const MoeSpec& spec) {
  return own.name.empty() ? spec.activation : own;
}

}  // namespace

LayerBytes layer_bytes(const MoeSpec& spec, const WeightSource& source) {
  LayerBytes bytes;
  for (const WeightId id : weights::kAll) {
    const WeightInfo info = source.describe(id);
    const double all = static_cast<double>(info.count) * static_cast<double>(info.rows) *
                       static_cast<double>(info.cols) * static_cast<double>(bit_size(info.dtype)) /
                       8;
    if (id.mlp() == WeightMlp::kRouted) {
      bytes.expert += all / static_cast<double>(spec.num_experts);
    } else if (id.mlp()) {
      bytes.shared += all;
    } else {
      bytes.whole += all;
    }
  }
  return bytes;
}

const ModelLayer& PlannedModel::layer(int64_t index) const {
  const auto found = std::ranges::find(layers, index, &ModelLayer::index);
  if (found != layers.end()) return *found;
  throw Error(ErrorCode::kLayerNotFound,
              {.what = fmt::format("the trace has layer {}, which the model has not", index),
               .tensor = fmt::format("layers.{}.topk_ids", index),
               .expected = fmt::format("one of {} MoE layers from {} to {}", layers.size(),
                                       layers.front().index, layers.back().index)});
}

LayerSizes layer_sizes(const ModelLayer& layer, int32_t tp) {
  const MoeSpec& spec = layer.spec;
  const double slice = 1.0 / tp;
  const auto columns = [&](int64_t size) { return static_cast<double>(size) * slice; };
  LayerSizes sizes;
  sizes.expert = expert_size(spec, expert_width(spec), columns(spec.intermediate_size),
                             is_gated(spec.activation), layer.bytes.expert * slice);
  const auto add = [&](int64_t intermediate, const ActivationSpec& activation) {
    sizes.common.push_back(
        expert_size(spec, spec.hidden_size, columns(intermediate), is_gated(activation), 0));
  };
  if (spec.shared.mode != SharedMode::kNone) {
    for (int64_t i = 0; i < spec.shared.count; ++i) {
      add(spec.shared.intermediate_size, or_routed(spec.shared.activation, spec));
    }
  }
  if (spec.residual.intermediate_size > 0) {
    add(spec.residual.intermediate_size, or_routed(spec.residual.activation, spec));
  }
  double elements = 0;
  for (const ExpertSize& size : sizes.common) elements += size.elements;
  for (ExpertSize& size : sizes.common) {
    size.bytes = layer.bytes.shared * slice * size.elements / std::max(elements, 1.0);
  }
  return sizes;
}

std::string real_bytes_text(double bytes) {
  constexpr double kMost = 1e19;  // fits 64 bits
  return bytes_text(static_cast<uint64_t>(std::clamp(bytes, 0.0, kMost)));
}

double rank_weight_bytes(const PlannedModel& model, int64_t redundant_experts, int32_t ep,
                         int32_t tp) {
  double bytes = 0;
  for (const ModelLayer& layer : model.layers) {
    const int64_t slots = (layer.spec.num_experts + redundant_experts + ep - 1) / ep;
    bytes += (static_cast<double>(slots) * layer.bytes.expert + layer.bytes.shared) / tp +
             layer.bytes.whole;
  }
  return bytes;
}

double workspace_bytes(const MoeSpec& spec, int32_t tp, const WorkspaceRows& rows) {
  constexpr double kBytesOf16Bits = 2;
  constexpr double kBytesOf32Bits = 4;
  const auto hidden = static_cast<double>(spec.hidden_size);
  const auto width = static_cast<double>(expert_width(spec));
  const double intermediate = static_cast<double>(spec.intermediate_size) / tp;
  // Each token's row is packed for its way and read, its result comes and is added up.
  const double own = rows.own_tokens * (rows.row_bytes + hidden * kBytesOf32Bits);
  const double received = rows.received_rows * (rows.row_bytes + hidden * kBytesOf16Bits);
  return own + received + rows.slot_rows * (intermediate + width) * kBytesOf16Bits;
}

}  // namespace conclave::tool
