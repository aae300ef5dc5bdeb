#include "conclave/weights.h"

#include "routing/router_tensors.h"
#include "spec/weight_names.h"

#include <array>
#include <string>
#include <string_view>

namespace conclave::inline v0 {
namespace {

std::string_view name_of(WeightMatrix matrix) {
  switch (matrix) {
    case WeightMatrix::kGate:
      return "gate";
    case WeightMatrix::kUp:
      return "up";
    case WeightMatrix::kDown:
      break;
  }
  return "down";
}

std::string_view name_of(LayerWeight weight) {
  switch (weight) {
    case LayerWeight::kRouter:
      return "router";
    case LayerWeight::kRouterBias:
      return "router_bias";
    case LayerWeight::kRouterInputScale:
      return "router_input_scale";
    case LayerWeight::kSelectionBias:
      return "selection_bias";
    case LayerWeight::kExpertScale:
      return "expert_scale";
    case LayerWeight::kGlobalScale:
      return "global_scale";
    case LayerWeight::kSharedExpertGate:
      return "shared_expert_gate";
    case LayerWeight::kMixGate:
      return "mix_gate";
    case LayerWeight::kMixGateBias:
      return "mix_gate_bias";
    case LayerWeight::kLatentDown:
      return "latent_down";
    case LayerWeight::kLatentNorm:
      return "latent_norm";
    case LayerWeight::kLatentUp:
      return "latent_up";
    case LayerWeight::kOutputBias:
      return "output_bias";
    case LayerWeight::kRouterTensor0:
    case LayerWeight::kRouterTensor1:
    case LayerWeight::kRouterTensor2:
    case LayerWeight::kRouterTensor3:
    case LayerWeight::kRouterTensor4:
    case LayerWeight::kRouterTensor5:
    case LayerWeight::kRouterTensor6:
    case LayerWeight::kRouterTensor7:
      break;
  }
  return "";
}

std::string name_of_router_tensor(WeightId id) {
  if (const routing::RouterTensor* tensor = routing::find_router_tensor(id))
    return std::string(tensor->name);
  const size_t number = id.index() - weights::router_tensor(0).index();
  return "router_tensor_" + std::to_string(number);
}

}  // namespace

std::string_view prefix_of(WeightMlp mlp) {
  switch (mlp) {
    case WeightMlp::kRouted:
      break;
    case WeightMlp::kShared:
      return "shared_";
    case WeightMlp::kResidual:
      return "residual_";
  }
  return "";
}

std::string_view suffix_of(WeightPlane plane) {
  switch (plane) {
    case WeightPlane::kWeights:
      break;
    case WeightPlane::kBias:
      return "_bias";
    case WeightPlane::kScale:
      return "_scale";
    case WeightPlane::kZero:
      return "_zero";
    case WeightPlane::kSecondScale:
      return "_second_scale";
    case WeightPlane::kGlobalScale:
      return "_global_scale";
    case WeightPlane::kInputScale:
      return "_input_scale";
    case WeightPlane::kColumnOrder:
      return "_column_order";
    case WeightPlane::kColumnFactor:
      return "_column_factor";
  }
  return "";
}

std::string to_string(WeightId id) {
  if (const auto own = id.layer()) {
    const std::string_view name = name_of(*own);
    return name.empty() ? name_of_router_tensor(id) : std::string(name);
  }
  std::string name(prefix_of(*id.mlp()));
  name += name_of(*id.matrix());
  name += suffix_of(*id.plane());
  return name;
}

ConstTensorView WeightSource::view(WeightId, int64_t) const { return {}; }

void WeightSource::release(WeightId, int64_t, const WeightBlock&) const {}

MemoryKind WeightSource::memory() const { return MemoryKind::kHost; }

void WeightSource::check_unchanged() const {}

std::string WeightSource::locate(WeightId id, int64_t expert) const {
  return to_string(id) + " of expert " + std::to_string(expert);
}

}  // namespace conclave::inline v0
