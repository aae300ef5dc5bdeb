#include "checkpoint/layer_assignment.h"

#include "checkpoint/tensor_name.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array kExpertRoles = {WeightRole::kGate, WeightRole::kUp, WeightRole::kDown};
constexpr std::array kSharedRoles = {WeightRole::kSharedGate, WeightRole::kSharedUp,
                                     WeightRole::kSharedDown};

// The matrices that a tensor holds, one below the other.
std::span<const WeightRole> roles_of(Part part) {
  static constexpr std::array kRoles = {WeightRole::kGate,       WeightRole::kUp,
                                        WeightRole::kDown,       WeightRole::kGate,
                                        WeightRole::kUp,         WeightRole::kRouter,
                                        WeightRole::kSharedGate, WeightRole::kSharedUp,
                                        WeightRole::kSharedDown, WeightRole::kSharedExpertGate};
  const auto index = static_cast<size_t>(part);
  if (part == Part::kGateUp) return std::span(kRoles).subspan(index, 2);
  return std::span(kRoles).subspan(part > Part::kGateUp ? index + 1 : index, 1);
}

bool is_stack(const NamePattern& pattern) {
  return is_expert_part(pattern.part) && !has_expert_placeholder(pattern.text);
}

std::string_view first_component(std::string_view text) { return text.substr(0, text.find('.')); }

std::string render_shape(std::span<const int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

// The first component that is a number: the expert a misspelt name most likely means.
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

bool is_weight_type(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

}  // namespace

LayerAssignment::LayerAssignment(const ModelConfig& config, const ShardSet& shards,
                                 const LayerTensors& tensors, const LayerConfig& layer,
                                 const ExpertForm& usual_form)
    : config_(config),
      shards_(shards),
      layer_(layer),
      stack_order_(config.architecture->ambiguous_stack),
      prefix_(fmt::format("{}{}.{}.", tensors.trunk, config.architecture->layers, layer.index)) {
  const std::vector<Match> matches = match_names(tensors.layers[static_cast<size_t>(layer.index)]);
  choose_form(matches, usual_form);
  choose_stack_order(matches);
  for (const Match& match : matches) {
    if (is_stack(*match.pattern)) {
      place_stack(match);
    } else {
      place(match);
    }
    bytes_ += stored(match.tensor).info->bytes;
  }
}

std::vector<LayerAssignment::Match> LayerAssignment::match_names(
    std::span<const LayerTensor> items) {
  const Architecture& architecture = *config_.architecture;
  const auto find = [&](const LayerTensor& item) -> std::optional<Match> {
    if (!item.canonical) return std::nullopt;
    for (const ExpertForm& form : architecture.expert_forms) {
      for (const NamePattern& pattern : form.patterns) {
        if (const auto expert = match_pattern(pattern.text, item.rest)) {
          return Match{&pattern, &form, item.tensor, *expert};
        }
      }
    }
    for (const NamePattern& pattern : architecture.once) {
      if (match_pattern(pattern.text, item.rest)) return Match{&pattern, nullptr, item.tensor, 0};
    }
    return std::nullopt;
  };
  std::vector<Match> matches;
  for (const LayerTensor& item : items) {
    const std::optional<Match> match = find(item);
    if (match) {
      matches.push_back(*match);
    } else if (in_moe_block(architecture, item.rest)) {
      if (first_stray_ < 0) first_stray_ = item.tensor;
      strays_.push_back(stored(item.tensor).info->name);
    }
  }
  return matches;
}

void LayerAssignment::choose_form(std::span<const Match> matches, const ExpertForm& usual_form) {
  int64_t most = 0;
  form_ = &usual_form;
  for (const ExpertForm& form : config_.architecture->expert_forms) {
    const int64_t count = std::count_if(matches.begin(), matches.end(),
                                        [&](const Match& match) { return match.form == &form; });
    expert_tensors_ += count;
    if (count <= most) continue;
    most = count;
    form_ = &form;
  }
}

void LayerAssignment::choose_stack_order(std::span<const Match> matches) {
  for (const Match& match : matches) {
    const std::vector<int64_t>& shape = stored(match.tensor).info->shape;
    if (!is_stack(*match.pattern) || shape.size() != 3) continue;
    const auto [rows, cols] = extent(match.pattern->part);
    const bool rows_first = shape[1] == rows && shape[2] == cols;
    const bool cols_first = shape[1] == cols && shape[2] == rows;
    if (rows_first == cols_first) continue;
    stack_order_ = rows_first ? StackOrder::kRowsFirst : StackOrder::kColsFirst;
    return;
  }
}

void LayerAssignment::place(const Match& match) {
  const auto [rows, cols] = extent(match.pattern->part);
  const TensorInfo& info = *stored(match.tensor).info;
  const bool expert_exists =
      !is_expert_part(match.pattern->part) || match.expert < layer_.spec.num_experts;
  if (!expert_exists) {
    throw Error(ErrorCode::kTensorUnexpected,
                {.what = "an expert beyond the number that config.json gives",
                 .file = file_of(match.tensor),
                 .tensor = info.name,
                 .found = "expert " + std::to_string(match.expert),
                 .limit = fmt::format("{} experts, 0 to {}", layer_.spec.num_experts,
                                      layer_.spec.num_experts - 1),
                 .hint = "config.json and weights belong to different models"});
  }
  if (info.shape != std::vector<int64_t>{rows, cols}) {
    throw Error(ErrorCode::kTensorShape, {.what = "the shape does not fit config.json",
                                          .file = file_of(match.tensor),
                                          .tensor = info.name,
                                          .expected = expected_shape(*match.pattern),
                                          .found = render_shape(info.shape)});
  }
  const WeightRole role = roles_of(match.pattern->part).front();
  fill(role, match.expert,
       {.tensor = match.tensor, .offset = 0, .row_stride = cols, .col_stride = 1});
}

void LayerAssignment::place_stack(const Match& match) {
  const auto [rows, cols] = extent(match.pattern->part);
  const bool rows_first = stack_order_ == StackOrder::kRowsFirst;
  const int64_t experts = layer_.spec.num_experts;
  const TensorInfo& info = *stored(match.tensor).info;
  const std::vector<int64_t> expected = rows_first ? std::vector<int64_t>{experts, rows, cols}
                                                   : std::vector<int64_t>{experts, cols, rows};
  if (info.shape != expected) {
    throw Error(ErrorCode::kTensorShape, {.what = "the shape does not fit config.json",
                                          .file = file_of(match.tensor),
                                          .tensor = info.name,
                                          .expected = expected_shape(*match.pattern),
                                          .found = render_shape(info.shape)});
  }
  int64_t first_row = 0;
  for (WeightRole role : roles_of(match.pattern->part)) {
    const int64_t row_stride = rows_first ? cols : 1;
    for (int64_t expert = 0; expert < experts; ++expert) {
      fill(role, expert,
           {.tensor = match.tensor,
            .offset = expert * rows * cols + first_row * row_stride,
            .row_stride = row_stride,
            .col_stride = rows_first ? 1 : rows});
    }
    first_row += matrix_extent(role).rows;
  }
}

void LayerAssignment::fill(WeightRole role, int64_t expert, const MatrixLocation& location) {
  std::vector<MatrixLocation>& slots = slots_[static_cast<size_t>(role)];
  if (slots.empty()) {
    const bool expert_role = role <= WeightRole::kDown;
    slots.resize(static_cast<size_t>(expert_role ? layer_.spec.num_experts : 1));
  }
  MatrixLocation& slot = slots[static_cast<size_t>(expert)];
  if (slot.tensor >= 0) {
    const std::string expert_name =
        role <= WeightRole::kDown ? fmt::format(" of expert {}", expert) : "";
    throw Error(
        ErrorCode::kTensorDuplicate,
        {.what = fmt::format("two tensors hold the {} matrix{} of layer {}", to_string(role),
                             expert_name, layer_.index),
         .file = file_of(location.tensor),
         .tensor = stored(location.tensor).info->name,
         .expected = "one tensor for each matrix",
         .found = fmt::format("{} in {} too", stored(slot.tensor).info->name,
                              shards_.names[static_cast<size_t>(stored(slot.tensor).shard)]),
         .hint = "the file mixes two layouts or two saves of the model"});
  }
  slot = location;
}

LayerAssignment::Extent LayerAssignment::matrix_extent(WeightRole role) const {
  const MoeSpec& spec = layer_.spec;
  switch (role) {
    case WeightRole::kGate:
    case WeightRole::kUp:
      return {spec.intermediate_size, spec.hidden_size};
    case WeightRole::kDown:
      return {spec.hidden_size, spec.intermediate_size};
    case WeightRole::kRouter:
      return {spec.num_experts, spec.hidden_size};
    case WeightRole::kSharedGate:
    case WeightRole::kSharedUp:
      return {spec.shared.intermediate_size, spec.hidden_size};
    case WeightRole::kSharedDown:
      return {spec.hidden_size, spec.shared.intermediate_size};
    case WeightRole::kSharedExpertGate:
      return {1, spec.hidden_size};
  }
  return {0, 0};
}

LayerAssignment::Extent LayerAssignment::extent(Part part) const {
  Extent sum{0, 0};
  for (WeightRole role : roles_of(part)) {
    const Extent matrix = matrix_extent(role);
    sum = {sum.rows + matrix.rows, matrix.cols};
  }
  return sum;
}

bool LayerAssignment::is_filled(Part part, int64_t expert) const {
  const auto roles = roles_of(part);
  return std::all_of(roles.begin(), roles.end(), [&](WeightRole role) {
    const std::vector<MatrixLocation>& slots = slots_[static_cast<size_t>(role)];
    return !slots.empty() && slots[static_cast<size_t>(expert)].tensor >= 0;
  });
}

std::vector<NamePattern> LayerAssignment::expected_once() const {
  const std::string_view block = first_component(form_->patterns.front().text);
  std::vector<NamePattern> expected;
  for (const NamePattern& pattern : config_.architecture->once) {
    const auto same_part =
        std::find_if(expected.begin(), expected.end(),
                     [&](const NamePattern& p) { return p.part == pattern.part; });
    if (same_part == expected.end()) {
      expected.push_back(pattern);
    } else if (first_component(same_part->text) != block &&
               first_component(pattern.text) == block) {
      *same_part = pattern;
    }
  }
  return expected;
}

int64_t LayerAssignment::missing_count() const {
  int64_t count = 0;
  for (const NamePattern& pattern : form_->patterns) {
    const int64_t copies = is_stack(pattern) ? 1 : layer_.spec.num_experts;
    // A config may claim far more experts and layers than there are tensors.
    if (slots_[static_cast<size_t>(roles_of(pattern.part).front())].empty()) {
      count += copies;
      continue;
    }
    for (int64_t expert = 0; expert < copies; ++expert) {
      if (!is_filled(pattern.part, expert)) ++count;
    }
  }
  for (const NamePattern& pattern : expected_once()) {
    if (!is_filled(pattern.part, 0)) ++count;
  }
  return count;
}

std::vector<std::string> LayerAssignment::missing(size_t limit) const {
  std::vector<std::string> names;
  const auto check = [&](const NamePattern& pattern, int64_t expert) {
    if (names.size() >= limit || is_filled(pattern.part, expert)) return;
    names.push_back(full_name(pattern, expert) + " " + expected_shape(pattern));
  };
  for (const NamePattern& pattern : expected_once()) check(pattern, 0);
  for (const NamePattern& pattern : form_->patterns) {
    const int64_t copies = is_stack(pattern) ? 1 : layer_.spec.num_experts;
    for (int64_t expert = 0; expert < copies && names.size() < limit; ++expert) {
      check(pattern, expert);
    }
  }
  return names;
}

std::string LayerAssignment::summary() const {
  int64_t expected = 0;
  for (const NamePattern& pattern : form_->patterns) {
    expected += is_stack(pattern) ? 1 : layer_.spec.num_experts;
  }
  return fmt::format("{} of {} expert tensors of layer {}", expert_tensors_, expected,
                     layer_.index);
}

void LayerAssignment::check_strays() const {
  if (first_stray_ < 0) return;
  const TensorInfo& info = *stored(first_stray_).info;
  const std::string_view rest =
      std::string_view(info.name).substr(std::min(info.name.size(), prefix_.size()));
  const int64_t expert = std::clamp<int64_t>(number_in(rest), 0, layer_.spec.num_experts - 1);
  std::vector<std::string> known;
  for (const ExpertForm& form : config_.architecture->expert_forms) {
    for (const NamePattern& pattern : form.patterns) known.push_back(full_name(pattern, expert));
  }
  for (const NamePattern& pattern : config_.architecture->once) {
    known.push_back(full_name(pattern, 0));
  }
  const std::optional<std::string> nearest = nearest_name(info.name, known);
  throw Error(ErrorCode::kTensorUnexpected,
              {.what = strays_.size() == 1
                           ? std::string("a tensor of a MoE block has a name of no known meaning")
                           : fmt::format("this and {} more tensors of a MoE block have names of no "
                                         "known meaning",
                                         strays_.size() - 1),
               .file = file_of(first_stray_),
               .tensor = info.name,
               .expected = fmt::format("names of the {} family", config_.architecture->name),
               .found = render_shape(info.shape),
               .hint = nearest ? "nearest known name: " + *nearest : ""});
}

LayerMap LayerAssignment::finish() {
  LayerMap map;
  map.index = layer_.index;
  map.prefix = fmt::format("{}{}.", prefix_, first_component(form_->patterns.front().text));
  map.layout = form_->name;
  const bool stacked = is_stack(form_->patterns.front());
  if (stacked && stack_order_ == StackOrder::kColsFirst) map.layout += "_transposed";
  map.bytes = bytes_;
  map.support = config_.support;
  for (size_t i = 0; i < kNumRoles; ++i) {
    if (slots_[i].empty()) continue;
    const auto role = static_cast<WeightRole>(i);
    const auto [rows, cols] = matrix_extent(role);
    map.roles[i].info = {.count = static_cast<int64_t>(slots_[i].size()),
                         .rows = rows,
                         .cols = cols,
                         .dtype = stored(slots_[i].front().tensor).info->dtype};
  }
  check_same_type(kExpertRoles);
  if (layer_.spec.shared.mode != SharedMode::kNone) check_same_type(kSharedRoles);
  for (size_t i = 0; i < kNumRoles; ++i) map.roles[i].matrices = std::move(slots_[i]);
  if (map.support) map.support = type_support(map);
  return map;
}

Support LayerAssignment::type_support(const LayerMap& map) const {
  for (const RoleMatrices& role : map.roles) {
    if (role.info.count == 0 || is_weight_type(role.info.dtype)) continue;
    return Support::no(fmt::format("{} is stored as {}; this version runs F32, F16 and BF16",
                                   stored(role.matrices.front().tensor).info->name,
                                   to_string(role.info.dtype)));
  }
  const RoleMatrices& shared = map.role(WeightRole::kSharedGate);
  const DType expert_type = map.role(WeightRole::kGate).info.dtype;
  if (shared.info.count == 0 || shared.info.dtype == expert_type) return Support::yes();
  return Support::no(fmt::format("the shared expert is stored as {}, the routed experts as {}",
                                 to_string(shared.info.dtype), to_string(expert_type)));
}

void LayerAssignment::check_same_type(std::span<const WeightRole> roles) const {
  const MatrixLocation& first = slots_[static_cast<size_t>(roles.front())].front();
  const TensorInfo& reference = *stored(first.tensor).info;
  for (WeightRole role : roles) {
    for (const MatrixLocation& matrix : slots_[static_cast<size_t>(role)]) {
      const TensorInfo& info = *stored(matrix.tensor).info;
      if (info.dtype == reference.dtype) continue;
      throw Error(ErrorCode::kTensorDType,
                  {.what = "weights that are used together are stored in different types",
                   .file = file_of(matrix.tensor),
                   .tensor = info.name,
                   .expected = fmt::format("{}, as {}", to_string(reference.dtype), reference.name),
                   .found = std::string(to_string(info.dtype))});
    }
  }
}

std::string LayerAssignment::full_name(const NamePattern& pattern, int64_t expert) const {
  return prefix_ + render_pattern(pattern.text, expert);
}

std::string LayerAssignment::expected_shape(const NamePattern& pattern) const {
  const auto [rows, cols] = extent(pattern.part);
  if (!is_stack(pattern)) return fmt::format("[{}, {}]", rows, cols);
  const int64_t experts = layer_.spec.num_experts;
  return fmt::format("[{}, {}, {}] or [{}, {}, {}]", experts, rows, cols, experts, cols, rows);
}

const StoredTensor& LayerAssignment::stored(int32_t tensor) const {
  return shards_.tensors[static_cast<size_t>(tensor)];
}

std::string LayerAssignment::file_of(int32_t tensor) const {
  return shards_.files[static_cast<size_t>(stored(tensor).shard)].path().string();
}

}  // namespace conclave::inline v0::checkpoint
