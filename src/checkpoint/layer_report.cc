// The part of LayerAssignment that says what a layer must have, what it lacks, and what is left
// over.
#include "checkpoint/generic_names.h"
#include "checkpoint/layer_assignment.h"
#include "checkpoint/name_list.h"
#include "checkpoint/tensor_name.h"

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

}  // namespace

// A part that several patterns may fill is expected under the first one. A fused part is expected
// only if the layer has something in that tensor.
std::vector<NamePattern> LayerAssignment::expected_once() const {
  std::vector<NamePattern> expected;
  WeightTable<bool> covered;
  for_each_once(*config_.architecture, [&](const NamePattern& pattern) {
    const auto ids = ids_of(pattern.part);
    const auto is_covered = [&](WeightId id) { return covered[id]; };
    const auto is_optional = [&](WeightId id) { return shapes_[id].is_optional; };
    if (ids.empty() || !is_wanted(pattern) || std::any_of(ids.begin(), ids.end(), is_covered) ||
        std::all_of(ids.begin(), ids.end(), is_optional)) {
      return;
    }
    for (WeightId id : ids) covered[id] = true;
    expected.push_back(pattern);
  });
  return expected;
}

template <class Visit>
void LayerAssignment::for_each_expected(Visit visit) const {
  const auto visit_kinds = [&](const NamePattern& pattern, int64_t copies) {
    visit(pattern, std::nullopt, copies);
    if (!is_quantisable(pattern.part)) return;
    for (const WeightPlane plane : quant::kCodePlanes) {
      const auto ids = ids_of(pattern.part, plane);
      const bool left_out = std::all_of(ids.begin(), ids.end(), [&](WeightId id) {
        return shapes_[id].is_optional && slots_[id].empty();
      });
      if (has_ids(ids) && !left_out) visit(pattern, plane, copies);
    }
  };
  for (const NamePattern& pattern : expected_once()) visit_kinds(pattern, 1);
  for (const NamePattern& pattern : naming_.form->patterns) {
    if (is_wanted(pattern)) visit_kinds(pattern, is_stack(pattern) ? 1 : layer_.spec.num_experts);
  }
}

bool LayerAssignment::lacks(const NamePattern& pattern, std::optional<WeightPlane> plane,
                            int64_t expert) const {
  if (is_filled(ids_of(pattern.part, plane), expert)) return false;
  if (!layer_.is_part) return true;
  // A matrix absent from this part belongs to another; everything that is not a matrix of an MLP
  // belongs to the part of plain values.
  const auto ids = ids_of(pattern.part);
  if (!ids.front().mlp()) return layer_.quant == nullptr;
  return std::any_of(ids.begin(), ids.end(), [&](WeightId id) {
    return has_any_of(id.with(WeightPlane::kWeights), expert);
  });
}

std::string LayerAssignment::expected_name(WeightId matrix, int64_t expert) const {
  std::string name;
  for_each_expected([&](const NamePattern& pattern, std::optional<WeightPlane> plane, int64_t) {
    const auto ids = ids_of(pattern.part);
    if (plane || !name.empty() || std::find(ids.begin(), ids.end(), matrix) == ids.end()) return;
    name = full_name(pattern, plane, expert) + " " + expected_shape(pattern, plane);
  });
  return name;
}

int64_t LayerAssignment::missing_count() const {
  int64_t count = 0;
  for_each_expected(
      [&](const NamePattern& pattern, std::optional<WeightPlane> plane, int64_t copies) {
        const std::vector<WeightId> ids = ids_of(pattern.part, plane);
        // A config may claim far more experts and layers than there are tensors.
        if (slots_[ids.front()].empty() && !layer_.is_part) {
          count += copies;
          return;
        }
        for (int64_t expert = 0; expert < copies; ++expert) {
          if (lacks(pattern, plane, expert)) ++count;
        }
      });
  return count + static_cast<int64_t>(missing_inputs_.size());
}

std::vector<std::string> LayerAssignment::missing(size_t limit) const {
  std::vector<std::string> names;
  for_each_expected(
      [&](const NamePattern& pattern, std::optional<WeightPlane> plane, int64_t copies) {
        for (int64_t expert = 0; expert < copies && names.size() < limit; ++expert) {
          if (!lacks(pattern, plane, expert)) continue;
          names.push_back(full_name(pattern, plane, expert) + " " + expected_shape(pattern, plane));
        }
      });
  for (const std::string& name : missing_inputs_) {
    if (names.size() < limit) names.push_back(name + " beside the codes that need it");
  }
  return names;
}

std::string LayerAssignment::summary() const {
  int64_t expected = 0;
  for (const NamePattern& pattern : naming_.form->patterns) {
    if (is_wanted(pattern)) expected += is_stack(pattern) ? 1 : layer_.spec.num_experts;
  }
  return fmt::format("{} of {} expert tensors of layer {}", expert_tensors_, expected,
                     layer_.index);
}

void LayerAssignment::check_strays() const {
  if (first_stray_ < 0) return;
  const TensorInfo& info = table_.info(first_stray_);
  const std::string_view rest =
      std::string_view(info.name).substr(std::min(info.name.size(), prefix_.size()));
  const int64_t expert = std::clamp<int64_t>(number_in(rest), 0, layer_.spec.num_experts - 1);
  std::vector<std::string> known;
  const auto add = [&](const NamePattern& pattern) {
    if (is_wanted(pattern)) known.push_back(full_name(pattern, expert));
  };
  for_each_form(*config_.architecture, [&](const ExpertForm& form) {
    std::for_each(form.patterns.begin(), form.patterns.end(), add);
  });
  for_each_once(*config_.architecture, add);
  const std::optional<std::string> nearest = nearest_name(info.name, known);
  throw Error(ErrorCode::kTensorUnexpected,
              {.what = strays_.size() == 1
                           ? std::string("a tensor of a MoE block has a name of no known meaning")
                           : fmt::format("this and {} more tensors of a MoE block have names of no "
                                         "known meaning",
                                         strays_.size() - 1),
               .file = table_.path_of(first_stray_),
               .tensor = info.name,
               .expected = fmt::format("names of the {} family", config_.architecture->name),
               .found = render_shape(info.shape),
               .hint = nearest ? "nearest known name: " + *nearest : ""});
}

std::string LayerAssignment::full_name(const NamePattern& pattern, int64_t expert) const {
  const auto base = config_.architecture->bases[static_cast<size_t>(naming_.base)];
  return prefix_ + render_name(pattern, base, expert + first_expert());
}

std::string LayerAssignment::expected_shape(const NamePattern& pattern) const {
  const TensorBlock block = block_of(pattern);
  const bool by_shape = pattern.axes == AxisOrder::kByShape && block.is_stack && !block.is_vector;
  const AxisOrder axes = by_shape ? AxisOrder::kRowsFirst : axes_of(pattern);
  std::string text = render_shape(accepted_shapes(block, pattern, axes).front());
  if (by_shape) {
    text += " or " + render_shape(accepted_shapes(block, pattern, AxisOrder::kColsFirst).front());
  }
  return text;
}

}  // namespace conclave::inline v0::checkpoint
