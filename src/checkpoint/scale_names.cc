#include "checkpoint/scale_names.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kWeightSuffix = ".weight";
// Has the usual names.
constexpr Method kUnknownMethod = {.name = {}, .read = nullptr};

// A name that ends in `suffix` belongs to the matrix whose name ends in `ending` instead.
struct Suffix {
  std::string_view suffix;
  std::string_view ending;
  WeightPlane plane;
};
constexpr std::array kSuffixes = {
    Suffix{"_scale_inv", "", WeightPlane::kScale},  // X.weight_scale_inv, experts.X_scale_inv
    Suffix{"_scale", "", WeightPlane::kScale},      // X.weight_scale, experts.X_scale
    Suffix{"_weight_scale", "", WeightPlane::kScale},
    Suffix{".scale", kWeightSuffix, WeightPlane::kScale},
    Suffix{".input_scale", kWeightSuffix, WeightPlane::kInputScale},
    Suffix{".activation_scale", kWeightSuffix, WeightPlane::kInputScale},
    Suffix{"_input_scale", "", WeightPlane::kInputScale},
    Suffix{"_activation_scale", "", WeightPlane::kInputScale},
};

bool is_quantisable(WeightId id) {
  return (id.mlp() == WeightMlp::kRouted || id.mlp() == WeightMlp::kShared) &&
         id.plane() == WeightPlane::kWeights;
}

// The name of a matrix that may be quantised and has such a plane.
std::optional<NameMatch> match_matrix(const Architecture& architecture, const LayerShapes& shapes,
                                      std::string_view matrix, WeightPlane plane) {
  const auto wanted = [&](const NamePattern& pattern) {
    return is_quantisable(pattern.part) && has_all(shapes, ids_of(pattern.part, plane));
  };
  return match_name(architecture, matrix, wanted);
}

// Whether the name is that of a matrix that the layer has as values, and that may be stored as
// codes all the same.
bool match_values(const Architecture& architecture, const std::optional<QuantizedWeights>& quant,
                  const LayerShapes& shapes, std::string_view matrix) {
  const StoredPlane* const codes = row_of(quant, matrix, WeightPlane::kWeights);
  if (codes == nullptr || codes->decode_values == nullptr) return false;
  const auto wanted = [&](const NamePattern& pattern) {
    const auto ids = ids_of(pattern.part);
    return !is_quantisable(pattern.part) && !ids.empty() && has_all(shapes, ids);
  };
  return match_name(architecture, matrix, wanted).has_value();
}

}  // namespace

std::vector<ScaleName> scale_names(std::string_view name) {
  std::vector<ScaleName> names;
  for (const Suffix& row : kSuffixes) {
    if (name.size() <= row.suffix.size() || !name.ends_with(row.suffix)) continue;
    std::string matrix(name.substr(0, name.size() - row.suffix.size()));
    names.push_back({.matrix = matrix.append(row.ending), .plane = row.plane});
  }
  return names;
}

std::vector<std::string> usual_names(std::string_view matrix, WeightPlane plane) {
  std::vector<std::string> names;
  for (const Suffix& row : kSuffixes) {
    if (row.plane != plane || !matrix.ends_with(row.ending)) continue;
    std::string name(matrix.substr(0, matrix.size() - row.ending.size()));
    names.push_back(name.append(row.suffix));
  }
  return names;
}

std::string usual_scale_name(std::string_view matrix, WeightPlane plane, std::string_view method) {
  const Method* const found = find_method(method);
  const Method& row = found == nullptr ? kUnknownMethod : *found;
  std::string name(matrix);
  if (plane == WeightPlane::kScale) return name.append(row.scale);
  if (!matrix.ends_with(kWeightSuffix)) return name.append("_").append(row.step);
  name.resize(name.size() - kWeightSuffix.size());
  return name.append(".").append(row.step);
}

bool is_quantisable(Part part) {
  const auto ids = ids_of(part);
  return !ids.empty() &&
         std::all_of(ids.begin(), ids.end(), [](WeightId id) { return is_quantisable(id); });
}

std::vector<WeightId> ids_of(Part part, std::optional<WeightPlane> plane) {
  const auto own = ids_of(part);
  std::vector<WeightId> ids(own.begin(), own.end());
  if (!plane) return ids;
  for (WeightId& id : ids) id = id.with(*plane);
  return ids;
}

bool is_common(const quant::PlaneShape& plane) {
  return plane.is_single || quant::is_by_column(plane.plane);
}

std::optional<ScaleMatch> match_scale_name(const Architecture& architecture,
                                           const std::optional<QuantizedWeights>& quant,
                                           const LayerShapes& shapes, std::string_view rest) {
  for (const StoredName& stored : stored_names(quant, rest)) {
    if (stored.row->use != StoredPlane::Use::kPlane) continue;
    const auto name = match_matrix(architecture, shapes, stored.matrix, stored.row->plane);
    if (name) return ScaleMatch{.name = *name, .plane = stored.row->plane, .row = stored.row};
  }
  for (const ScaleName& scale : scale_names(rest)) {
    const auto name = match_matrix(architecture, shapes, scale.matrix, scale.plane);
    if (name) return ScaleMatch{.name = *name, .plane = scale.plane};
  }
  return std::nullopt;
}

std::optional<StoredPlane::Use> match_aid(const Architecture& architecture,
                                          const std::optional<QuantizedWeights>& quant,
                                          const LayerShapes& shapes, std::string_view rest) {
  for (const StoredName& stored : stored_names(quant, rest)) {
    const bool is_plane = stored.row->use == StoredPlane::Use::kPlane;
    const auto of_codes = [&] {
      return match_matrix(architecture, shapes, stored.matrix, WeightPlane::kWeights).has_value();
    };
    if (!is_plane && of_codes()) return stored.row->use;
    if (match_values(architecture, quant, shapes, stored.matrix)) {
      return is_plane ? StoredPlane::Use::kInput : stored.row->use;
    }
  }
  return std::nullopt;
}

}  // namespace conclave::inline v0::checkpoint
