#include "checkpoint/scale_names.h"

#include "checkpoint/role_shape.h"
#include "core/layer_roles.h"
#include "core/weight_id.h"
#include "core/weight_types.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kWeight = ".weight";

// A name that ends in `suffix` belongs to the matrix whose name ends in `ending` instead.
struct Suffix {
  std::string_view suffix;
  std::string_view ending;
  TensorKind kind;
};
constexpr std::array kSuffixes = {
    Suffix{"_scale_inv", "", TensorKind::kScale},  // X.weight_scale_inv, experts.X_scale_inv
    Suffix{"_scale", "", TensorKind::kScale},      // X.weight_scale, experts.X_scale
    Suffix{"_weight_scale", "", TensorKind::kScale},
    Suffix{".scale", kWeight, TensorKind::kScale},
    Suffix{".input_scale", kWeight, TensorKind::kInputScale},
    Suffix{".activation_scale", kWeight, TensorKind::kInputScale},
    Suffix{"_input_scale", "", TensorKind::kInputScale},
    Suffix{"_activation_scale", "", TensorKind::kInputScale},
};

bool is_quantisable(WeightRole role) {
  const WeightId id = weight_id(role);
  return (id.mlp == Mlp::kRouted || id.mlp == Mlp::kShared) && id.plane == Plane::kWeights;
}

}  // namespace

std::vector<ScaleName> scale_names(std::string_view name) {
  std::vector<ScaleName> names;
  for (const Suffix& row : kSuffixes) {
    if (name.size() <= row.suffix.size() || !name.ends_with(row.suffix)) continue;
    std::string matrix(name.substr(0, name.size() - row.suffix.size()));
    names.push_back({.matrix = matrix.append(row.ending), .kind = row.kind});
  }
  return names;
}

std::string usual_scale_name(std::string_view matrix, TensorKind kind, std::string_view method) {
  const bool fp8 = method == "fp8";
  std::string name(matrix);
  if (kind == TensorKind::kScale) return name + (fp8 ? "_scale_inv" : "_scale");
  const std::string_view word = fp8 ? "activation_scale" : "input_scale";
  if (!matrix.ends_with(kWeight)) return name.append("_").append(word);
  name.resize(name.size() - kWeight.size());
  return name.append(".").append(word);
}

bool is_quantisable(Part part) {
  const auto roles = roles_of(part);
  return !roles.empty() && std::all_of(roles.begin(), roles.end(),
                                       [](WeightRole role) { return is_quantisable(role); });
}

bool is_scale_role(WeightRole role) {
  const Plane plane = weight_id(role).plane;
  return plane == Plane::kScale || plane == Plane::kInputScale;
}

std::vector<WeightRole> roles_of(Part part, TensorKind kind) {
  const auto matrices = roles_of(part);
  std::vector<WeightRole> roles(matrices.begin(), matrices.end());
  if (kind == TensorKind::kPlain) return roles;
  for (WeightRole& role : roles) {
    role = plane_of(role, kind == TensorKind::kScale ? Plane::kScale : Plane::kInputScale);
  }
  return roles;
}

std::optional<ScaleMatch> match_scale_name(const Architecture& architecture, const MoeSpec& spec,
                                           std::string_view rest) {
  if (is_plain(spec.weight_dtype)) return std::nullopt;
  for (const ScaleName& scale : scale_names(rest)) {
    const auto is_there = [&](WeightRole role) { return role_shape(spec, role).count > 0; };
    const auto wanted = [&](const NamePattern& pattern) {
      if (!is_quantisable(pattern.part)) return false;
      const std::vector<WeightRole> roles = roles_of(pattern.part, scale.kind);
      return std::all_of(roles.begin(), roles.end(), is_there);
    };
    const auto name = match_name(architecture, scale.matrix, wanted);
    if (name) return ScaleMatch{.name = *name, .kind = scale.kind};
  }
  return std::nullopt;
}

}  // namespace conclave::inline v0::checkpoint
