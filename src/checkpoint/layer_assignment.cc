#include "checkpoint/layer_assignment.h"

#include "checkpoint/generic_names.h"
#include "checkpoint/tensor_name.h"
#include "core/weight_id.h"
#include "core/weight_types.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array kExpertRoles = {WeightRole::kGate,   WeightRole::kUp,
                                     WeightRole::kDown,   WeightRole::kGateBias,
                                     WeightRole::kUpBias, WeightRole::kDownBias};
constexpr std::array kExpertMatrices = {WeightRole::kGate, WeightRole::kUp, WeightRole::kDown};
constexpr std::array kSharedMatrices = {WeightRole::kSharedGate, WeightRole::kSharedUp,
                                        WeightRole::kSharedDown};

bool is_stack(const NamePattern& pattern) {
  return is_expert_part(pattern.part) && !has_expert_placeholder(pattern.text);
}

std::string_view first_component(std::string_view text) { return text.substr(0, text.find('.')); }

std::string render_shape(std::span<const int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

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
      axes_(axes_of_stack(config.architecture->ambiguous_stack)),
      prefix_(tensors.layer_start(*config.architecture, layer.index)) {
  for (size_t i = 0; i < kNumRoles; ++i) {
    shapes_[i] = role_shape(layer.spec, static_cast<WeightRole>(i));
  }
  const std::vector<Match> matches = match_names(tensors.layers[static_cast<size_t>(layer.index)]);
  choose_naming(matches, usual);
  choose_axes(matches);
  for (const Match& match : matches) {
    bytes_ += table_.info(match.tensor).bytes;
    if (match.name.pattern->part != Part::kNotRead) place(match);
  }
}

// Whether the layer has every role of the pattern: the same name has other meanings elsewhere.
bool LayerAssignment::is_wanted(const NamePattern& pattern) const {
  return has_roles(roles_of(pattern.part));
}

bool LayerAssignment::has_roles(std::span<const WeightRole> roles) const {
  return std::all_of(roles.begin(), roles.end(),
                     [&](WeightRole role) { return shape_of(role).count > 0; });
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
      matches.push_back({*name, item.tensor});
    } else if (const std::optional<Match> scale = match_scale(item)) {
      matches.push_back(*scale);
    } else if (is_absent(item)) {
      continue;
    } else if (in_moe_block(architecture, item.rest) && !is_foreign_scale(item, items)) {
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
  if (architecture.shared.mode != SharedMode::kSigmoidGate || !item.canonical) return false;
  if (layer_.spec.shared.mode != SharedMode::kNone) return false;
  const auto is_gate = [](const NamePattern& pattern) {
    return pattern.part == Part::kSharedExpertGate;
  };
  return match_name(architecture, item.rest, is_gate).has_value();
}

bool LayerAssignment::covers_experts(const ExpertForm& form) const {
  return std::all_of(kExpertRoles.begin(), kExpertRoles.end(), [&](WeightRole role) {
    if (shape_of(role).count == 0) return true;
    return std::any_of(form.patterns.begin(), form.patterns.end(), [&](const NamePattern& pattern) {
      const auto roles = roles_of(pattern.part);
      return is_wanted(pattern) && std::find(roles.begin(), roles.end(), role) != roles.end();
    });
  });
}

void LayerAssignment::choose_naming(std::span<const Match> matches, const LayerNaming& usual) {
  naming_ = usual;
  int64_t most = -1;
  for_each_form(*config_.architecture, [&](const ExpertForm& form) {
    const int64_t count = std::count_if(matches.begin(), matches.end(), [&](const Match& match) {
      return match.name.form == &form && match.kind == TensorKind::kPlain;
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
    if (match.kind != TensorKind::kPlain) continue;
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
  for (WeightRole role : roles_of(pattern.part)) {
    const RoleShape shape = shape_of(role);
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
  if (match.kind != TensorKind::kPlain) return place_scale(match, expert);
  const TensorBlock block = block_of(pattern);
  const AxisOrder axes = axes_of(pattern);
  const TensorInfo& info = table_.info(match.tensor);
  if (!fits(info.shape, block, pattern, axes)) {
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
  const auto roles = roles_of(pattern.part);
  RoleShare share{.parts = static_cast<int64_t>(roles.size())};
  for (WeightRole role : roles) {
    for (share.index = 0; share.index < (block.is_stack ? block.count : 1); ++share.index) {
      fill(role, block.is_stack ? share.index : expert,
           locate(block, pattern, axes, share, match.tensor));
    }
    ++share.part;
    share.rows_before += block.is_vector ? shape_of(role).cols : shape_of(role).rows;
  }
}

void LayerAssignment::fill(WeightRole role, int64_t expert, const MatrixLocation& location) {
  std::vector<MatrixLocation>& slots = slots_[static_cast<size_t>(role)];
  if (slots.empty()) slots.resize(static_cast<size_t>(shape_of(role).count));
  MatrixLocation& slot = slots[static_cast<size_t>(expert)];
  if (slot.tensor >= 0) {
    const std::string expert_name =
        shape_of(role).count > 1 ? fmt::format(" of expert {}", expert) : "";
    throw Error(ErrorCode::kTensorDuplicate,
                {.what = fmt::format("two tensors hold the {} matrix{} of layer {}",
                                     to_string(role), expert_name, layer_.index),
                 .file = table_.path_of(location.tensor),
                 .tensor = table_.info(location.tensor).name,
                 .expected = "one tensor for each matrix",
                 .found = fmt::format("{} in {} too", table_.info(slot.tensor).name,
                                      table_.name_of(slot.tensor)),
                 .hint = "the file mixes two layouts or two saves of the model"});
  }
  slot = location;
}

bool LayerAssignment::is_filled(std::span<const WeightRole> roles, int64_t expert) const {
  return std::all_of(roles.begin(), roles.end(), [&](WeightRole role) {
    const std::vector<MatrixLocation>& slots = slots_[static_cast<size_t>(role)];
    return !slots.empty() && slots[static_cast<size_t>(expert)].tensor >= 0;
  });
}

// A part that several patterns may fill is expected under the first one. A fused part is expected
// only if the layer has one of its roles in that tensor.
std::vector<NamePattern> LayerAssignment::expected_once() const {
  std::vector<NamePattern> expected;
  std::array<bool, kNumRoles> covered{};
  for_each_once(*config_.architecture, [&](const NamePattern& pattern) {
    const auto roles = roles_of(pattern.part);
    const auto is_covered = [&](WeightRole role) { return covered[static_cast<size_t>(role)]; };
    const auto is_optional = [&](WeightRole role) { return shape_of(role).is_optional; };
    if (roles.empty() || !is_wanted(pattern) ||
        std::any_of(roles.begin(), roles.end(), is_covered) ||
        std::all_of(roles.begin(), roles.end(), is_optional)) {
      return;
    }
    for (WeightRole role : roles) covered[static_cast<size_t>(role)] = true;
    expected.push_back(pattern);
  });
  return expected;
}

template <class Visit>
void LayerAssignment::for_each_expected(Visit visit) const {
  const auto visit_kinds = [&](const NamePattern& pattern, int64_t copies) {
    visit(pattern, TensorKind::kPlain, copies);
    if (!is_quantisable(pattern.part)) return;
    for (const TensorKind kind : {TensorKind::kScale, TensorKind::kInputScale}) {
      if (has_roles(roles_of(pattern.part, kind))) visit(pattern, kind, copies);
    }
  };
  for (const NamePattern& pattern : expected_once()) visit_kinds(pattern, 1);
  for (const NamePattern& pattern : naming_.form->patterns) {
    if (is_wanted(pattern)) visit_kinds(pattern, is_stack(pattern) ? 1 : layer_.spec.num_experts);
  }
}

int64_t LayerAssignment::missing_count() const {
  int64_t count = 0;
  for_each_expected([&](const NamePattern& pattern, TensorKind kind, int64_t copies) {
    const std::vector<WeightRole> roles = roles_of(pattern.part, kind);
    // A config may claim far more experts and layers than there are tensors.
    if (slots_[static_cast<size_t>(roles.front())].empty()) {
      count += copies;
      return;
    }
    for (int64_t expert = 0; expert < copies; ++expert) {
      if (!is_filled(roles, expert)) ++count;
    }
  });
  return count;
}

std::vector<std::string> LayerAssignment::missing(size_t limit) const {
  std::vector<std::string> names;
  for_each_expected([&](const NamePattern& pattern, TensorKind kind, int64_t copies) {
    const std::vector<WeightRole> roles = roles_of(pattern.part, kind);
    for (int64_t expert = 0; expert < copies && names.size() < limit; ++expert) {
      if (is_filled(roles, expert)) continue;
      names.push_back(full_name(pattern, kind, expert) + " " + expected_shape(pattern, kind));
    }
  });
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
  for (size_t i = 0; i < kNumRoles; ++i) {
    if (slots_[i].empty()) continue;
    map.roles[i].info = {.count = static_cast<int64_t>(slots_[i].size()),
                         .rows = shapes_[i].rows,
                         .cols = shapes_[i].cols,
                         .dtype = table_.info(slots_[i].front().tensor).dtype};
    map.roles[i].matrices = std::move(slots_[i]);
  }
  if (map.support) map.support = type_support(map);
  return map;
}

void LayerAssignment::check_types() const {
  for (const auto& slots : slots_) {
    const auto role = static_cast<WeightRole>(&slots - slots_.data());
    if (slots.size() > 1) check_same_type(std::span(&role, 1));
  }
  check_same_type(kExpertMatrices);
  check_same_type(kSharedMatrices);
  check_scale_types();
}

// Codes are accepted only for matrices that the spec says are quantised.
bool LayerAssignment::is_type_of(WeightRole role, DType dtype) const {
  if (role == WeightRole::kHashTable) return dtype == DType::kI32 || dtype == DType::kI64;
  if (is_scale_role(role) || is_plain(dtype)) return true;
  const WeightId id = weight_id(role);
  const bool shared = id.mlp == Mlp::kShared;
  if ((!shared && id.mlp != Mlp::kRouted) || id.plane != Plane::kWeights) return false;
  const MoeSpec& spec = layer_.spec;
  return dtype == (shared ? shared_weight_dtype(spec) : spec.weight_dtype);
}

Support LayerAssignment::type_support(const LayerMap& map) const {
  if (!foreign_.empty()) {
    return Support::no(foreign_ +
                       " is quantised; this version reads codes of matrices of experts and shared "
                       "experts, and all others in F32, F16 or BF16");
  }
  for (size_t i = 0; i < kNumRoles; ++i) {
    const RoleMatrices& role = map.roles[i];
    if (role.info.count == 0 || is_type_of(static_cast<WeightRole>(i), role.info.dtype)) continue;
    return Support::no(fmt::format("{} is stored as {}; this version runs F32, F16 and BF16",
                                   table_.info(role.matrices.front().tensor).name,
                                   to_string(role.info.dtype)));
  }
  const RoleMatrices& shared = map.role(WeightRole::kSharedDown);
  const DType expert_type = map.role(WeightRole::kDown).info.dtype;
  if (shared.info.count == 0 || shared.info.dtype == expert_type) return Support::yes();
  if (!is_plain(expert_type)) return Support::yes();
  return Support::no(fmt::format("the shared expert is stored as {}, the routed experts as {}",
                                 to_string(shared.info.dtype), to_string(expert_type)));
}

void LayerAssignment::check_same_type(std::span<const WeightRole> roles) const {
  const TensorInfo* reference = nullptr;
  for (WeightRole role : roles) {
    for (const MatrixLocation& matrix : slots_[static_cast<size_t>(role)]) {
      const TensorInfo& info = table_.info(matrix.tensor);
      if (reference == nullptr) reference = &info;
      if (info.dtype == reference->dtype) continue;
      throw Error(
          ErrorCode::kTensorDType,
          {.what = "weights that are used together are stored in different types",
           .file = table_.path_of(matrix.tensor),
           .tensor = info.name,
           .expected = fmt::format("{}, as {}", to_string(reference->dtype), reference->name),
           .found = std::string(to_string(info.dtype))});
    }
  }
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
