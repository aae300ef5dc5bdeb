#include "checkpoint/layer_report.h"

#include "checkpoint/generic_names.h"
#include "checkpoint/name_list.h"
#include "checkpoint/scale_names.h"
#include "checkpoint/tensor_name.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace conclave::inline v0::checkpoint {
namespace {

std::string_view first_component(std::string_view text) { return text.substr(0, text.find('.')); }

// The first component that is a number: most likely the expert that a misspelt name means.
int64_t number_in(std::string_view text) {
  while (!text.empty()) {
    const std::string_view component = first_component(text);
    int64_t number = 0;
    const auto [end, error] =
        std::from_chars(component.data(), component.data() + component.size(), number);
    if (error == std::errc() && end == component.data() + component.size()) return number;
    text.remove_prefix(std::min(text.size(), component.size() + 1));
  }
  return 0;
}

int64_t copies_of(const LayerView& view, const NamePattern& pattern) {
  return is_stack(pattern) ? 1 : view.layer.spec.num_experts;
}

// The tensors of a layer that a pattern stands for, or those of a plane of them.
struct Expected {
  NamePattern pattern;
  std::optional<WeightPlane> plane;
  int64_t copies = 1;  // a tensor for each expert, or one
};

// Everything that the layer must have. A part that several patterns may fill is expected under the
// first one, and a fused part only if the layer has something in that tensor.
std::vector<Expected> expected_tensors(const LayerAssignment& layer) {
  const LayerView& view = layer.view;
  std::vector<Expected> expected;
  const auto add = [&](const NamePattern& pattern, int64_t copies) {
    expected.push_back({pattern, std::nullopt, copies});
    if (!is_quantisable(pattern.part)) return;
    for (const WeightPlane plane : quant::kCodePlanes) {
      const auto ids = ids_of(pattern.part, plane);
      const bool left_out = std::ranges::all_of(ids, [&](WeightId id) {
        return view.shapes[id].is_optional && layer.planes.slots[id].empty();
      });
      if (has_all(view.shapes, ids) && !left_out) expected.push_back({pattern, plane, copies});
    }
  };
  WeightTable<bool> covered;
  for_each_once(*view.config.architecture, [&](const NamePattern& pattern) {
    const auto ids = ids_of(pattern.part);
    const auto is_covered = [&](WeightId id) { return covered[id]; };
    const auto is_optional = [&](WeightId id) { return view.shapes[id].is_optional; };
    if (ids.empty() || !is_wanted(view, pattern) || std::ranges::any_of(ids, is_covered) ||
        std::ranges::all_of(ids, is_optional)) {
      return;
    }
    for (WeightId id : ids) covered[id] = true;
    add(pattern, 1);
  });
  for (const NamePattern& pattern : layer.layout.naming.form->patterns) {
    if (is_wanted(view, pattern)) add(pattern, copies_of(view, pattern));
  }
  return expected;
}

bool lacks(const LayerAssignment& layer, const Expected& expected, int64_t expert) {
  if (layer.planes.has_all(ids_of(expected.pattern.part, expected.plane), expert)) return false;
  const LayerConfig& config = layer.view.layer;
  if (!config.is_part) return true;
  // A matrix absent from this part belongs to another; everything that is not a matrix of an MLP
  // belongs to the part of plain values.
  const auto ids = ids_of(expected.pattern.part);
  if (!ids.front().mlp()) return config.quant == nullptr;
  return std::ranges::any_of(ids, [&](WeightId id) {
    return layer.planes.has_any_of(id.with(WeightPlane::kWeights), expert);
  });
}

std::string full_name(const LayerAssignment& layer, const NamePattern& pattern, int64_t expert) {
  const LayerView& view = layer.view;
  const auto base = view.config.architecture->bases[static_cast<size_t>(layer.layout.naming.base)];
  return view.prefix + render_name(pattern, base, expert + view.first_expert);
}

// "NAME [rows, cols]"
std::string describe(const LayerAssignment& layer, const Expected& expected, int64_t expert) {
  const auto& [pattern, plane, copies] = expected;
  std::string name = full_name(layer, pattern, expert);
  if (const StoredPlane* const row = expected_row(layer.view, pattern, plane)) {
    name = stored_name(*row, name);
  } else if (plane) {
    name = usual_scale_name(name, *plane, layer.view.config.quant_method);
  }
  return name + " " + expected_shape(layer.view, layer.layout, pattern, plane);
}

}  // namespace

int64_t count_missing(const LayerAssignment& layer) {
  auto count = static_cast<int64_t>(layer.planes.missing_inputs.size());
  for (const Expected& expected : expected_tensors(layer)) {
    const std::vector<WeightId> ids = ids_of(expected.pattern.part, expected.plane);
    // A config may claim far more experts and layers than there are tensors.
    if (layer.planes.slots[ids.front()].empty() && !layer.view.layer.is_part) {
      count += expected.copies;
      continue;
    }
    for (int64_t expert = 0; expert < expected.copies; ++expert) {
      if (lacks(layer, expected, expert)) ++count;
    }
  }
  return count;
}

std::vector<std::string> list_missing(const LayerAssignment& layer, size_t limit) {
  std::vector<std::string> names;
  for (const Expected& expected : expected_tensors(layer)) {
    for (int64_t expert = 0; expert < expected.copies && names.size() < limit; ++expert) {
      if (lacks(layer, expected, expert)) names.push_back(describe(layer, expected, expert));
    }
  }
  for (const std::string& name : layer.planes.missing_inputs) {
    if (names.size() < limit) names.push_back(name + " beside the codes that need it");
  }
  return names;
}

std::string expected_name(const LayerAssignment& layer, WeightId matrix, int64_t expert) {
  for (const Expected& expected : expected_tensors(layer)) {
    const auto ids = ids_of(expected.pattern.part);
    const bool holds = std::ranges::find(ids, matrix) != ids.end();
    if (holds && !expected.plane) return describe(layer, expected, expert);
  }
  return {};
}

std::string summary(const LayerAssignment& layer) {
  const LayerView& view = layer.view;
  int64_t expected = 0;
  for (const NamePattern& pattern : layer.layout.naming.form->patterns) {
    if (is_wanted(view, pattern)) expected += copies_of(view, pattern);
  }
  return fmt::format("{} of {} expert tensors of layer {}", layer.layout.expert_tensors, expected,
                     view.layer.index);
}

void check_strays(const LayerAssignment& layer) {
  if (layer.strays.empty()) return;
  const LayerView& view = layer.view;
  const int32_t first = layer.strays.front();
  const TensorInfo& info = view.table.info(first);
  const std::string_view rest =
      std::string_view(info.name).substr(std::min(info.name.size(), view.prefix.size()));
  const int64_t expert = std::clamp<int64_t>(number_in(rest), 0, view.layer.spec.num_experts - 1);
  std::vector<std::string> known;
  const auto add = [&](const NamePattern& pattern) {
    if (is_wanted(view, pattern)) known.push_back(full_name(layer, pattern, expert));
  };
  for_each_form(*view.config.architecture,
                [&](const ExpertForm& form) { std::ranges::for_each(form.patterns, add); });
  for_each_once(*view.config.architecture, add);
  const std::optional<std::string> nearest = nearest_name(info.name, known);
  throw Error(ErrorCode::kTensorUnexpected,
              {.what = layer.strays.size() == 1
                           ? std::string("a tensor of a MoE block has a name of no known meaning")
                           : fmt::format("this and {} more tensors of a MoE block have names of no "
                                         "known meaning",
                                         layer.strays.size() - 1),
               .file = view.table.path_of(first),
               .tensor = info.name,
               .expected = fmt::format("names of the {} family", view.config.architecture->name),
               .found = render_shape(info.shape),
               .hint = nearest ? "nearest known name: " + *nearest : ""});
}

}  // namespace conclave::inline v0::checkpoint
