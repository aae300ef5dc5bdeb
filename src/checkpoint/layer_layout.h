// The names and shapes of a layer's tensors, where a family leaves a choice: as most of them say.
#pragma once

#include "checkpoint/layer_matches.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

// The names of most of a layer's tensors.
struct LayerNaming {
  const ExpertForm* form = nullptr;
  int32_t base = 0;
};

struct LayerLayout {
  LayerNaming naming;
  AxisOrder axes = AxisOrder::kRowsFirst;  // for stacks whose pattern leaves it open
  int64_t expert_tensors = 0;              // tensors that have the names of any form
};
// `usual` gives the names of what is missing from a layer without any expert tensor; its form may
// be null.
LayerLayout choose_layout(const LayerView& view, std::span<const TensorMatch> matches,
                          const LayerNaming& usual);

AxisOrder axes_of(const LayerView& view, const LayerLayout& layout, const NamePattern& pattern);
// The shapes in which a plane of the pattern's matrices may lie, the usual one first.
std::vector<std::vector<int64_t>> plane_shapes(const LayerView& view, const LayerLayout& layout,
                                               const NamePattern& pattern, WeightPlane plane);
// "[rows, cols]" of a tensor that lies as the spec says.
std::string usual_shape(const LayerView& view, const NamePattern& pattern);
// The same of the tensor itself, or of a plane, as the quantisation's method stores it.
std::string expected_shape(const LayerView& view, const LayerLayout& layout,
                           const NamePattern& pattern, std::optional<WeightPlane> plane);

}  // namespace conclave::inline v0::checkpoint
