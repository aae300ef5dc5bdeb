#include "checkpoint/layer_assignment.h"

#include "checkpoint/generic_names.h"
#include "checkpoint/name_list.h"
#include "checkpoint/tensor_name.h"
#include "core/shared_facts.h"
#include "core/weight_types.h"
#include "routing/router_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array kExpertWeights = {weights::kGate,
                                       weights::kUp,
                                       weights::kDown,
                                       weights::kGate.with(WeightPlane::kBias),
                                       weights::kUp.with(WeightPlane::kBias),
                                       weights::kDown.with(WeightPlane::kBias)};
constexpr std::array kExpertMatrices = {weights::kGate, weights::kUp, weights::kDown};
constexpr std::array kSharedMatrices = {weights::kSharedGate, weights::kSharedUp,
                                        weights::kSharedDown};

AxisOrder axes_of_stack(StackOrder order) {
  return order == StackOrder::kColsFirst ? AxisOrder::kColsFirst : AxisOrder::kRowsFirst;
}

}  // namespace

LayerAssignment::LayerAssignment(const ModelConfig& config, const TensorTable& table,
                                 const LayerTensors& tensors, const LayerConfig& layer,
                                 const LayerNaming& usual)
    : config_(config),
      table_(table),
      layer_(layer),
      quant_(layer.quant != nullptr ? *layer.quant : config.quant),
      shapes_(layer_shapes(layer.spec)),
      axes_(axes_of_stack(config.architecture->ambiguous_stack)),
      prefix_(tensors.layer_start(*config.architecture, layer.index)),
      items_(tensors.layers[static_cast<size_t>(layer.index)]) {
  const std::vector<Match> matches = match_names(items_);
  choose_naming(matches, usual);
  choose_axes(matches);
  for (const Match& match : matches) {
    bytes_ += table_.info(match.tensor).bytes;
    if (match.name.pattern->part != Part::kNotRead) place(match);
  }
}

// Whether the layer has all that the pattern means: the same name has other meanings elsewhere.
bool LayerAssignment::is_wanted(const NamePattern& pattern) const {
  return has_ids(ids_of(pattern.part));
}

bool LayerAssignment::has_ids(std::span<const WeightId> ids) const {
  return std::all_of(ids.begin(), ids.end(), [&](WeightId id) { return shapes_[id].count > 0; });
}

std::vector<LayerAssignment::Match> LayerAssignment::match_names(
    std::span<const LayerTensor> items) {
  const Architecture& architecture = *config_.architecture;
  const auto wanted = [this](const NamePattern& pattern) { return is_wanted(pattern); };
  std::vector<Match> matches;
  for (const LayerTensor& item : items) {
    const std::optional<NameMatch> name =
        item.canonical ? match_name(architecture, item.rest, wanted) : std::nullopt;
    if (name) {
      matches.push_back({.name = *name,
                         .tensor = item.tensor,
                         .row = codes_row(quant_, table_.info(item.tensor))});
    } else if (const std::optional<Match> scale = match_scale(item)) {
      matches.push_back(*scale);
    } else if (is_absent(item) || is_aid(item)) {
      continue;
    } else if (in_moe_block(architecture, item.rest) && !is_foreign_scale(item)) {
      if (first_stray_ < 0) first_stray_ = item.tensor;
      strays_.push_back(table_.info(item.tensor).name);
    }
  }
  return matches;
}

// A layer without shared experts may still store their tensors with a width of 0, and the gate of
// their sum; neither contributes anything.
bool LayerAssignment::is_absent(const LayerTensor& item) const {
  if (is_empty(table_.info(item.tensor))) return true;
  const Architecture& architecture = *config_.architecture;
  if (!shared_facts(architecture.shared.mode).has_sigmoid_gate() || !item.canonical) return false;
  if (shared_facts(layer_.spec).is_there) return false;
  const auto is_gate = [](const NamePattern& pattern) {
    return pattern.part == Part::kSharedExpertGate;
  };
  return match_name(architecture, item.rest, is_gate).has_value();
}

bool LayerAssignment::covers_experts(const ExpertForm& form) const {
  return std::all_of(kExpertWeights.begin(), kExpertWeights.end(), [&](WeightId id) {
    if (shapes_[id].count == 0) return true;
    return std::any_of(form.patterns.begin(), form.patterns.end(), [&](const NamePattern& pattern) {
      const auto ids = ids_of(pattern.part);
      return is_wanted(pattern) && std::find(ids.begin(), ids.end(), id) != ids.end();
    });
  });
}

void LayerAssignment::choose_naming(std::span<const Match> matches, const LayerNaming& usual) {
  naming_ = usual;
  int64_t most = -1;
  for_each_form(*config_.architecture, [&](const ExpertForm& form) {
    const int64_t count = std::count_if(matches.begin(), matches.end(), [&](const Match& match) {
      return match.name.form == &form && !match.plane;
    });
    expert_tensors_ += count;
    const bool better = count > most && (count > 0 || naming_.form == nullptr);
    if (!better || !covers_experts(form)) return;
    most = count;
    naming_.form = &form;
  });
  std::vector<int64_t> bases(config_.architecture->bases.size());
  for (const Match& match : matches) ++bases[static_cast<size_t>(match.name.base)];
  const auto base = std::max_element(bases.begin(), bases.end());
  if (base != bases.end() && *base > 0) {
    naming_.base = static_cast<int32_t>(base - bases.begin());
  }
}

// A single stack whose shape fits one order only decides the order for the whole layer.
void LayerAssignment::choose_axes(std::span<const Match> matches) {
  for (const Match& match : matches) {
    const NamePattern& pattern = *match.name.pattern;
    const TensorBlock block = block_of(pattern);
    if (!block.is_stack || block.is_vector || pattern.axes != AxisOrder::kByShape) continue;
    if (match.plane || match.row != nullptr) continue;
    const std::vector<int64_t>& shape = table_.info(match.tensor).shape;
    const bool rows_first = fits(shape, block, pattern, AxisOrder::kRowsFirst);
    const bool cols_first = fits(shape, block, pattern, AxisOrder::kColsFirst);
    if (rows_first == cols_first) continue;
    axes_ = rows_first ? AxisOrder::kRowsFirst : AxisOrder::kColsFirst;
    return;
  }
}

TensorBlock LayerAssignment::block_of(const NamePattern& pattern) const {
  TensorBlock block;
  for (WeightId id : ids_of(pattern.part)) {
    const WeightShape& shape = shapes_[id];
    block.count = shape.count;
    block.is_vector = shape.is_vector;
    block.rows += shape.is_vector ? shape.cols : shape.rows;
    block.cols = shape.is_vector ? 1 : shape.cols;
  }
  const bool shared_stack = !is_expert_part(pattern.part) && layer_.spec.shared.count > 1 &&
                            block.count == layer_.spec.shared.count;
  block.is_stack = is_stack(pattern) || shared_stack;
  if (is_stack(pattern)) block.surplus = layer_.spec.num_zero_experts;
  return block;
}

AxisOrder LayerAssignment::axes_of(const NamePattern& pattern) const {
  if (pattern.axes != AxisOrder::kByShape) return pattern.axes;
  const TensorBlock block = block_of(pattern);
  return block.is_stack && !block.is_vector ? axes_ : AxisOrder::kRowsFirst;
}

int64_t LayerAssignment::first_expert() const {
  const bool second = config_.architecture->modality == Architecture::Modality::kSecond;
  return second ? layer_.spec.num_experts : 0;
}

// Whether the tensor belongs to a zero expert or to an expert of another modality.
bool LayerAssignment::is_surplus(const Match& match) const {
  const NamePattern& pattern = *match.name.pattern;
  if (!is_expert_part(pattern.part) || !has_expert_placeholder(pattern.text)) return false;
  const int64_t experts = layer_.spec.num_experts;
  const bool two_sets = config_.architecture->modality != Architecture::Modality::kOnly;
  const int64_t known = experts + layer_.spec.num_zero_experts + (two_sets ? experts : 0);
  const int64_t expert = match.name.expert;
  const bool own = expert >= first_expert() && expert < first_expert() + experts;
  return !own && expert < known;
}

void LayerAssignment::reject_expert(const Match& match) const {
  throw Error(ErrorCode::kTensorUnexpected,
              {.what = "an expert beyond the number that config.json gives",
               .file = table_.path_of(match.tensor),
               .tensor = table_.info(match.tensor).name,
               .found = "expert " + std::to_string(match.name.expert),
               .limit = fmt::format("{} experts, 0 to {}", layer_.spec.num_experts,
                                    layer_.spec.num_experts - 1),
               .hint = "config.json and weights belong to different models"});
}

void LayerAssignment::place(const Match& match) {
  const NamePattern& pattern = *match.name.pattern;
  if (is_surplus(match)) return;
  const int64_t expert =
      has_expert_placeholder(pattern.text) ? match.name.expert - first_expert() : 0;
  if (expert >= layer_.spec.num_experts) reject_expert(match);
  if (match.plane) return place_plane(match, expert);
  const TensorBlock block = block_of(pattern);
  const AxisOrder axes = match.row != nullptr ? AxisOrder::kRowsFirst : axes_of(pattern);
  const TensorInfo& info = table_.info(match.tensor);
  if (match.row == nullptr && !fits(info.shape, block, pattern, axes)) {
    throw Error(ErrorCode::kTensorShape, {.what = "the shape does not fit config.json",
                                          .file = table_.path_of(match.tensor),
                                          .tensor = info.name,
                                          .expected = expected_shape(pattern),
                                          .found = render_shape(info.shape)});
  }
  if (axes == AxisOrder::kColsFirst && bit_size(info.dtype) < 8) {
    throw Error(ErrorCode::kUnsupportedQuantization,
                {.what = "codes narrower than a byte are stored by columns",
                 .file = table_.path_of(match.tensor),
                 .tensor = info.name,
                 .expected = "rows of " + std::string(to_string(info.dtype)) + " codes",
                 .found = render_shape(info.shape)});
  }
  if (is_expert_part(pattern.part) && axes == AxisOrder::kColsFirst) transposed_ = true;
  fill_block(match, block, axes, expert);
}

void LayerAssignment::fill_block(const Match& match, const TensorBlock& block, AxisOrder axes,
                                 int64_t expert) {
  const NamePattern& pattern = *match.name.pattern;
  const std::vector<WeightId> ids = ids_of(pattern.part, match.plane);
  const bool shared = match.plane && is_common(shapes_[ids.front()].plane);
  const int32_t reading = add_reading(match, block);
  TensorShare share{.parts = shared ? 1 : static_cast<int64_t>(ids.size())};
  for (WeightId id : ids) {
    for (share.index = 0; share.index < (block.is_stack ? block.count : 1); ++share.index) {
      MatrixLocation location = locate(block, pattern, axes, share, match.tensor);
      location.reading = reading;
      fill(id, block.is_stack ? share.index : expert, location);
    }
    if (shared) continue;
    ++share.part;
    share.rows_before += block.is_vector ? shapes_[id].cols : shapes_[id].rows;
  }
}

void LayerAssignment::fill(WeightId id, int64_t expert, const MatrixLocation& location) {
  std::vector<MatrixLocation>& slots = slots_[id];
  if (slots.empty()) slots.resize(static_cast<size_t>(shapes_[id].count));
  MatrixLocation& slot = slots[static_cast<size_t>(expert)];
  if (slot.tensor >= 0) {
    const std::string expert_name =
        shapes_[id].count > 1 ? fmt::format(" of expert {}", expert) : "";
    throw Error(ErrorCode::kTensorDuplicate,
                {.what = fmt::format("two tensors hold the {} matrix{} of layer {}", to_string(id),
                                     expert_name, layer_.index),
                 .file = table_.path_of(location.tensor),
                 .tensor = table_.info(location.tensor).name,
                 .expected = "one tensor for each matrix",
                 .found = fmt::format("{} in {} too", table_.info(slot.tensor).name,
                                      table_.name_of(slot.tensor)),
                 .hint = "the file mixes two layouts or two saves of the model"});
  }
  slot = location;
}

bool LayerAssignment::is_filled(std::span<const WeightId> ids, int64_t expert) const {
  return std::all_of(ids.begin(), ids.end(), [&](WeightId id) {
    const std::vector<MatrixLocation>& slots = slots_[id];
    return !slots.empty() && slots[static_cast<size_t>(expert)].tensor >= 0;
  });
}

const MatrixLocation* LayerAssignment::first_filled(WeightId id) const {
  const auto found = std::ranges::find_if(
      slots_[id], [](const MatrixLocation& matrix) { return matrix.tensor >= 0; });
  return found == slots_[id].end() ? nullptr : &*found;
}

std::optional<DType> LayerAssignment::type_of(WeightId matrix, int64_t expert) const {
  if (!is_filled(std::span(&matrix, 1), expert)) return std::nullopt;
  return type_of(slots_[matrix][static_cast<size_t>(expert)]);
}

bool LayerAssignment::has_any_of(WeightId matrix, int64_t expert) const {
  return is_filled(std::span(&matrix, 1), expert) ||
         std::ranges::any_of(quant::kCodePlanes, [&](WeightPlane plane) {
           const WeightId id = matrix.with(plane);
           return is_filled(std::span(&id, 1), expert);
         });
}

LayerMap LayerAssignment::finish() {
  LayerMap map;
  map.index = layer_.index;
  map.prefix =
      prefix_ + std::string(config_.architecture->bases[static_cast<size_t>(naming_.base)]);
  map.layout = naming_.form->name;
  if (transposed_ && map.layout.starts_with("stacked")) map.layout += "_transposed";
  map.bytes = bytes_;
  map.support = config_.support ? layer_.support : config_.support;
  check_types();
  for (const WeightId id : weights::kAll) {
    if (slots_[id].empty()) continue;
    map.stored[id].info = {.count = static_cast<int64_t>(slots_[id].size()),
                           .rows = shapes_[id].rows,
                           .cols = shapes_[id].cols,
                           .dtype = type_of(*first_filled(id))};
    map.stored[id].matrices = std::move(slots_[id]);
  }
  map.readings = std::move(readings_);
  if (map.support) map.support = type_support(map);
  return map;
}

DType LayerAssignment::type_of(const MatrixLocation& location) const {
  if (location.reading < 0) return table_.info(location.tensor).dtype;
  return readings_[static_cast<size_t>(location.reading)].dtype;
}

void LayerAssignment::check_types() const {
  for (const WeightId id : weights::kAll) {
    if (slots_[id].size() > 1) check_same_type(std::span(&id, 1));
  }
  check_same_type(kExpertMatrices);
  check_same_type(kSharedMatrices);
  check_plane_types();
}

// Codes are accepted only for matrices that the spec says are quantised.
bool LayerAssignment::is_type_of(WeightId id, DType dtype) const {
  const routing::RouterTensor* const own = routing::find_router_tensor(id);
  if (own != nullptr && own->element == routing::RouterElement::kIndex) {
    return dtype == DType::kI32 || dtype == DType::kI64;
  }
  if (quant::is_code_plane(id.plane()) || is_plain(dtype)) return true;
  const bool may_be_codes = id.mlp() == WeightMlp::kRouted || id.mlp() == WeightMlp::kShared;
  if (!may_be_codes || id.plane() != WeightPlane::kWeights) return false;
  return dtype == shapes_[id].dtype;
}

Support LayerAssignment::type_support(const LayerMap& map) const {
  if (!foreign_.empty()) {
    return Support::no(foreign_ +
                       " is quantised; this version reads codes of matrices of experts and shared "
                       "experts, and all others in F32, F16 or BF16");
  }
  for (const WeightId id : weights::kAll) {
    const StoredMatrices& stored = map.stored[id];
    if (stored.info.count == 0 || is_type_of(id, stored.info.dtype)) continue;
    const auto first = std::ranges::find_if(
        stored.matrices, [](const MatrixLocation& matrix) { return matrix.tensor >= 0; });
    return Support::no(fmt::format("{} is stored as {}; this version runs F32, F16 and BF16",
                                   table_.info(first->tensor).name, to_string(stored.info.dtype)));
  }
  if (layer_.is_part) return Support::yes();  // the layer has them in another form
  const StoredMatrices& shared = map.stored[weights::kSharedDown];
  const DType expert_type = map.stored[weights::kDown].info.dtype;
  if (shared.info.count == 0 || shared.info.dtype == expert_type) return Support::yes();
  if (!is_plain(expert_type)) return Support::yes();
  return Support::no(fmt::format("the shared expert is stored as {}, the routed experts as {}",
                                 to_string(shared.info.dtype), to_string(expert_type)));
}

void LayerAssignment::check_same_type(std::span<const WeightId> ids) const {
  const MatrixLocation* reference = nullptr;
  for (WeightId id : ids) {
    for (const MatrixLocation& matrix : slots_[id]) {
      if (matrix.tensor < 0) continue;
      if (reference == nullptr) reference = &matrix;
      if (type_of(matrix) == type_of(*reference)) continue;
      throw Error(ErrorCode::kTensorDType,
                  {.what = "weights that are used together are stored in different types",
                   .file = table_.path_of(matrix.tensor),
                   .tensor = table_.info(matrix.tensor).name,
                   .expected = fmt::format("{}, as {}", to_string(type_of(*reference)),
                                           table_.info(reference->tensor).name),
                   .found = std::string(to_string(type_of(matrix)))});
    }
  }
}

}  // namespace conclave::inline v0::checkpoint
