#include "checkpoint/gguf/layer_form.h"

#include "checkpoint/gguf/row_reader.h"
#include "quant/gguf/block_type.h"

#include "conclave/gguf.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace checkpoint {
namespace {

constexpr std::array kMatrices = {WeightMatrix::kGate, WeightMatrix::kUp, WeightMatrix::kDown};

// The types of an MLP's matrices, seen together.
struct TypesOfMlp {
  std::optional<DType> plain;  // if all have it
  bool all_blocks = true;
  bool has_offsets = false;
  int64_t group = quant::kMaxBlockElements;  // the smallest of any
  bool fits_4_bits = true;
  bool lowers_codes = false;          // any of them, where they become codes of 4 bits
  std::optional<DType> element;       // if all have it
  std::optional<ScaleValues> values;  // likewise
};

void add(const quant::BlockType& block, bool is_first, TypesOfMlp& types) {
  types.lowers_codes |= lowers_codes(block);
  types.values = is_first || types.values == block.scale_values ? std::optional(block.scale_values)
                                                                : std::nullopt;
  types.has_offsets |= block.has_offset;
  types.group = std::min(types.group, block.group);
  types.fits_4_bits &= fits_4_bits(block);
  types.element = is_first || types.element == block.element ? block.element : std::nullopt;
}

void add(const io::GgufType& type, bool is_first, TypesOfMlp& types) {
  const std::optional<DType> plain = plain_type(type);
  types.plain = is_first || types.plain == plain ? plain : std::nullopt;
  const quant::BlockType* block = quant::find_block_type(type.name);
  types.all_blocks &= block != nullptr;
  if (block != nullptr) add(*block, is_first, types);
}

// What two MLPs need that share a type of codes.
TypesOfMlp both(TypesOfMlp types, const TypesOfMlp& others) {
  types.has_offsets |= others.has_offsets;
  types.group = std::min(types.group, others.group);
  types.fits_4_bits &= others.fits_4_bits;
  types.lowers_codes |= others.lowers_codes;
  if (types.element != others.element) types.element.reset();
  if (types.values != others.values) types.values.reset();
  return types;
}

DType codes_of(const TypesOfMlp& types) {
  return types.fits_4_bits ? DType::kI4 : types.element.value_or(DType::kI8);
}

QuantSpec scales_of(const TypesOfMlp& types) {
  const ScaleValues values = types.values.value_or(ScaleValues::kFloat);
  // What is taken off codes goes into offsets, as a product with the scale.
  const bool offsets_have_others = types.fits_4_bits && types.lowers_codes;
  return {.weights = WeightScale::kBlock,
          .block_rows = 1,
          .block_cols = types.group,
          .signed_scales = true,
          .scale_values = values,
          .zeros = types.has_offsets ? WeightZero::kOffset : WeightZero::kNone,
          .zero_values = types.has_offsets && !offsets_have_others ? values : ScaleValues::kFloat};
}

TypesOfMlp types_of(const GgufLayer& layer, WeightMlp mlp) {
  TypesOfMlp types;
  bool is_first = true;
  for (const WeightMatrix matrix : kMatrices) {
    for (const GgufMatrix& stored : layer.stored[{mlp, matrix}].matrices) {
      add(*stored.place.tensor->type, std::exchange(is_first, false), types);
    }
  }
  return types;
}

bool has_factors(const GgufLayer& layer) {
  return layer.gate_factor.place || layer.up_factor.place || layer.down_factor.place;
}

DType plain_or_f32(const TypesOfMlp& types) { return types.plain.value_or(DType::kF32); }

}  // namespace

GgufForm form_of(const GgufLayer& layer) {
  const TypesOfMlp routed = types_of(layer, WeightMlp::kRouted);
  const TypesOfMlp shared = types_of(layer, WeightMlp::kShared);
  const bool has_shared = layer.has(weights::kSharedDown);
  GgufForm form;
  form.residual = plain_or_f32(types_of(layer, WeightMlp::kResidual));
  form.shared = plain_or_f32(shared);
  if (!routed.all_blocks) {
    form.routed = has_factors(layer) ? DType::kF32 : plain_or_f32(routed);
    return form;
  }
  const bool share_codes = has_shared && shared.all_blocks;
  const TypesOfMlp coded = share_codes ? both(routed, shared) : routed;
  form.routed = codes_of(coded);
  if (share_codes) form.shared = form.routed;
  form.quant = scales_of(coded);
  if (has_factors(layer)) {
    form.quant.scale_values = ScaleValues::kFloat;
    form.quant.zero_values = ScaleValues::kFloat;
  }
  return form;
}

}  // namespace checkpoint

std::vector<WeightForm> gguf_block_forms() {
  std::vector<WeightForm> forms;
  for (const quant::BlockType& block : quant::block_types()) {
    checkpoint::TypesOfMlp types;
    add(block, true, types);
    forms.push_back({.name = block.name, .dtype = codes_of(types), .quant = scales_of(types)});
  }
  return forms;
}

}  // namespace conclave::inline v0
