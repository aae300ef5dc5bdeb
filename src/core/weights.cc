#include "conclave/weights.h"

#include <array>
#include <string>
#include <string_view>

namespace conclave::inline v0 {
namespace {

std::string_view name_of(WeightMlp mlp) {
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

std::string_view name_of(WeightPlane plane) {
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
    case LayerWeight::kHashTable:
      return "hash_table";
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
  }
  return "unknown";
}

}  // namespace

std::string to_string(WeightId id) {
  if (const auto own = id.layer()) return std::string(name_of(*own));
  std::string name(name_of(*id.mlp()));
  name += name_of(*id.matrix());
  name += name_of(*id.plane());
  return name;
}

ConstTensorView WeightSource::view(WeightId, int64_t) const { return {}; }

MemoryKind WeightSource::memory() const { return MemoryKind::kHost; }

std::string WeightSource::locate(WeightId id, int64_t expert) const {
  return to_string(id) + " of expert " + std::to_string(expert);
}

}  // namespace conclave::inline v0
