#include "checkpoint/layer_layout.h"

#include "checkpoint/generic_names.h"
#include "checkpoint/name_list.h"
#include "checkpoint/scale_names.h"

#include <algorithm>
#include <array>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array kExpertWeights = {weights::kGate,
                                       weights::kUp,
                                       weights::kDown,
                                       weights::kGate.with(WeightPlane::kBias),
                                       weights::kUp.with(WeightPlane::kBias),
                                       weights::kDown.with(WeightPlane::kBias)};

bool covers_experts(const LayerView& view, const ExpertForm& form) {
  return std::ranges::all_of(kExpertWeights, [&](WeightId id) {
    if (view.shapes[id].count == 0) return true;
    return std::ranges::any_of(form.patterns, [&](const NamePattern& pattern) {
      const auto ids = ids_of(pattern.part);
      return is_wanted(view, pattern) && std::ranges::find(ids, id) != ids.end();
    });
  });
}

void choose_form(const LayerView& view, std::span<const TensorMatch> matches, LayerLayout& layout) {
  int64_t most = -1;
  for_each_form(*view.config.architecture, [&](const ExpertForm& form) {
    const int64_t count = std::ranges::count_if(matches, [&](const TensorMatch& match) {
      return match.name.form == &form && !match.plane;
    });
    layout.expert_tensors += count;
    const bool better = count > most && (count > 0 || layout.naming.form == nullptr);
    if (!better || !covers_experts(view, form)) return;
    most = count;
    layout.naming.form = &form;
  });
}

void choose_base(const LayerView& view, std::span<const TensorMatch> matches, LayerNaming& naming) {
  std::vector<int64_t> bases(view.config.architecture->bases.size());
  for (const TensorMatch& match : matches) ++bases[static_cast<size_t>(match.name.base)];
  const auto base = std::ranges::max_element(bases);
  if (base != bases.end() && *base > 0) naming.base = static_cast<int32_t>(base - bases.begin());
}

// A single stack whose shape fits one order only decides the order for the whole layer.
AxisOrder choose_axes(const LayerView& view, std::span<const TensorMatch> matches) {
  for (const TensorMatch& match : matches) {
    const NamePattern& pattern = *match.name.pattern;
    const TensorBlock block = block_of(view, pattern);
    if (!block.is_stack || block.is_vector || pattern.axes != AxisOrder::kByShape) continue;
    if (match.plane || match.row != nullptr) continue;
    const std::vector<int64_t>& shape = view.table.info(match.tensor).shape;
    const bool rows_first = fits(shape, block, pattern, AxisOrder::kRowsFirst);
    const bool cols_first = fits(shape, block, pattern, AxisOrder::kColsFirst);
    if (rows_first != cols_first) return rows_first ? AxisOrder::kRowsFirst : AxisOrder::kColsFirst;
  }
  const bool cols_first = view.config.architecture->ambiguous_stack == StackOrder::kColsFirst;
  return cols_first ? AxisOrder::kColsFirst : AxisOrder::kRowsFirst;
}

}  // namespace

LayerLayout choose_layout(const LayerView& view, std::span<const TensorMatch> matches,
                          const LayerNaming& usual) {
  LayerLayout layout{.naming = usual, .axes = choose_axes(view, matches)};
  choose_form(view, matches, layout);
  choose_base(view, matches, layout.naming);
  return layout;
}

AxisOrder axes_of(const LayerView& view, const LayerLayout& layout, const NamePattern& pattern) {
  if (pattern.axes != AxisOrder::kByShape) return pattern.axes;
  const TensorBlock block = block_of(view, pattern);
  return block.is_stack && !block.is_vector ? layout.axes : AxisOrder::kRowsFirst;
}

// Trailing axes of size one may be left out, and a stack has one more axis in front.
std::vector<std::vector<int64_t>> plane_shapes(const LayerView& view, const LayerLayout& layout,
                                               const NamePattern& pattern, WeightPlane plane) {
  TensorBlock block = block_of(view, pattern, plane);
  if (axes_of(view, layout, pattern) == AxisOrder::kColsFirst) std::swap(block.rows, block.cols);
  std::vector<std::vector<int64_t>> shapes;
  const auto add = [&](std::vector<int64_t> shape, int64_t count) {
    if (block.is_stack) shape.insert(shape.begin(), count);
    shapes.push_back(std::move(shape));
  };
  for (const int64_t count : {block.count, block.count + block.surplus}) {
    add({block.rows, block.cols}, count);
    if (block.cols == 1) add({block.rows}, count);
    if (block.cols == 1 && block.rows == 1) add({}, count);
    // ModelOpt also keeps the axes inside a block.
    add({block.rows, 1, block.cols, 1}, count);
    if (block.surplus == 0) break;
  }
  return shapes;
}

std::string usual_shape(const LayerView& view, const NamePattern& pattern) {
  const TensorBlock block = block_of(view, pattern);
  const auto show = [&](AxisOrder axes) {
    return render_shape(accepted_shapes(block, pattern, axes).front());
  };
  if (pattern.axes != AxisOrder::kByShape) return show(pattern.axes);
  if (!block.is_stack || block.is_vector) return show(AxisOrder::kRowsFirst);
  return show(AxisOrder::kRowsFirst) + " or " + show(AxisOrder::kColsFirst);
}

std::string expected_shape(const LayerView& view, const LayerLayout& layout,
                           const NamePattern& pattern, std::optional<WeightPlane> plane) {
  if (const StoredPlane* const row = expected_row(view, pattern, plane)) {
    const WantedPlane wanted = wanted_plane(view, pattern, block_of(view, pattern, plane));
    return render_shape(shapes_of(*row, wanted).front());
  }
  if (!plane) return usual_shape(view, pattern);
  return render_shape(plane_shapes(view, layout, pattern, *plane).front());
}

}  // namespace conclave::inline v0::checkpoint
