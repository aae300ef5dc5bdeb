#include "checkpoint/layer_matches.h"

#include "checkpoint/coded_values.h"
#include "checkpoint/scale_names.h"
#include "core/shared_facts.h"
#include "core/weight_types.h"

#include <algorithm>
#include <unordered_map>

namespace conclave::inline v0::checkpoint {
namespace {

MethodForms forms_of(const LayerView& view) {
  return {.model = view.config.quant, .layer = view.quant};
}

// The row by which a matrix that the layer has as values is packed; null for values, and for codes
// that lie as the form says.
const StoredPlane* row_of_values(const LayerView& view, const TensorInfo& info) {
  const StoredPlane* const row = values_row(view.quant, info);
  if (row != nullptr && row->decode_values != nullptr) return row;
  const auto* const form = form_of_values(forms_of(view), info.name);
  return form == nullptr ? row : codes_row(*form, info);
}

std::optional<TensorMatch> match_one(const LayerView& view, const LayerTensor& item) {
  if (!item.canonical) return std::nullopt;
  const Architecture& architecture = *view.config.architecture;
  const auto name = match_name(architecture, item.rest, [&](const NamePattern& pattern) {
    return is_wanted(view, pattern);
  });
  if (name) {
    const TensorInfo& info = view.table.info(item.tensor);
    const bool has_codes = is_quantisable(name->pattern->part);
    return TensorMatch{.name = *name,
                       .tensor = item.tensor,
                       .row = has_codes ? codes_row(view.quant, info) : row_of_values(view, info)};
  }
  const auto scale = match_scale_name(architecture, view.quant, view.shapes, item.rest);
  if (!scale) return std::nullopt;
  return TensorMatch{
      .name = scale->name, .tensor = item.tensor, .plane = scale->plane, .row = scale->row};
}

// Whether the tensor can be dropped without losing anything. A layer without shared experts may
// still store their tensors with a width of 0, and the gate of their sum; neither contributes.
bool is_absent(const LayerView& view, const LayerTensor& item) {
  if (is_empty(view.table.info(item.tensor))) return true;
  const Architecture& architecture = *view.config.architecture;
  if (!shared_facts(architecture.shared.mode).has_sigmoid_gate() || !item.canonical) return false;
  if (shared_facts(view.layer.spec).is_there) return false;
  const auto is_gate = [](const NamePattern& pattern) {
    return pattern.part == Part::kSharedExpertGate;
  };
  return match_name(architecture, item.rest, is_gate).has_value();
}

// Whether the tensor belongs to the codes of a matrix that the layer has as values. Beside values
// it means nothing.
bool is_value_aid(const LayerView& view, const LayerTensor& item) {
  const auto* const form = form_of_values(forms_of(view), view.table.info(item.tensor).name);
  if (form == nullptr) return false;
  const auto aid = match_value_aid(*view.config.architecture, *form, view.shapes, item.rest);
  return aid && std::ranges::any_of(view.items, [&](const LayerTensor& other) {
           if (other.rest != aid->matrix) return false;
           const TensorInfo& info = view.table.info(other.tensor);
           return holds_codes(**form, codes_row(*form, info), info);
         });
}

// Whether the tensor serves to read a matrix, or is of no use for it.
bool is_aid(const LayerView& view, const LayerTensor& item) {
  if (!item.canonical) return false;
  return match_aid(*view.config.architecture, view.quant, view.shapes, item.rest) ||
         is_value_aid(view, item);
}

using ByRest = std::unordered_map<std::string_view, int32_t>;

// The matrix in a form that is not read whose scale has this name; null if there is none.
const TensorInfo* foreign_matrix(const LayerView& view, const ByRest& by_rest,
                                 std::string_view scale_name) {
  std::vector<std::string> matrices;
  for (StoredName& stored : stored_names(view.quant, scale_name)) {
    matrices.push_back(std::move(stored.matrix));
  }
  for (ScaleName& scale : scale_names(scale_name)) matrices.push_back(std::move(scale.matrix));
  for (const std::string& matrix : matrices) {
    const auto found = by_rest.find(matrix);
    if (found == by_rest.end()) continue;
    const TensorInfo& info = view.table.info(found->second);
    const auto name =
        match_name(*view.config.architecture, matrix,
                   [&](const NamePattern& pattern) { return is_wanted(view, pattern); });
    const DType type = type_as_codes(view.quant, info);
    if (!name || is_plain(type)) continue;
    // A surplus scale of a matrix that is read is a fault.
    const bool is_read = is_quantisable(name->pattern->part) &&
                         has_all(view.shapes, ids_of(name->pattern->part, WeightPlane::kScale));
    if (!is_read || type != view.quant->element) return &info;
  }
  return nullptr;
}

// Tells scales of matrices in forms that are not read from names without a meaning.
void sort_unknown(const LayerView& view, std::span<const LayerTensor> unknown,
                  LayerMatches& matches) {
  ByRest by_rest;
  if (view.quant && !unknown.empty()) {
    for (const LayerTensor& item : view.items) by_rest.emplace(item.rest, item.tensor);
  }
  for (const LayerTensor& item : unknown) {
    const TensorInfo* const foreign = foreign_matrix(view, by_rest, item.rest);
    if (foreign == nullptr) {
      matches.strays.push_back(item.tensor);
    } else if (matches.foreign.empty()) {
      matches.foreign = foreign->name;
    }
  }
}

}  // namespace

LayerMatches match_tensors(const LayerView& view) {
  LayerMatches matches;
  std::vector<LayerTensor> unknown;
  for (const LayerTensor& item : view.items) {
    const auto match = match_one(view, item);
    if (match) matches.tensors.push_back(*match);
    if (!match && is_absent(view, item)) continue;
    if (match || is_aid(view, item)) {
      matches.bytes += view.table.info(item.tensor).bytes;
    } else if (in_moe_block(*view.config.architecture, item.rest)) {
      unknown.push_back(item);
    }
  }
  sort_unknown(view, unknown, matches);
  return matches;
}

}  // namespace conclave::inline v0::checkpoint
