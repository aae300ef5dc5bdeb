#include "checkpoint/gguf/layer_form.h"

#include "checkpoint/gguf/row_reader.h"
#include "quant/gguf/block_type.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::array kMatrices = {WeightMatrix::kGate, WeightMatrix::kUp, WeightMatrix::kDown};

// The types of an MLP's matrices, seen together.
struct TypesOfMlp {
  std::optional<DType> plain;  // if all have it
  bool all_blocks = true;
  bool has_offsets = false;
  int64_t group = quant::kMaxBlockElements;  // the smallest of any
  bool fits_4_bits = true;
};

void add(const io::GgufType& type, bool is_first, TypesOfMlp& types) {
  const std::optional<DType> plain = plain_type(type);
  types.plain = is_first || types.plain == plain ? plain : std::nullopt;
  const quant::BlockType* block = quant::find_block_type(type.name);
  types.all_blocks &= block != nullptr;
  if (block == nullptr) return;
  types.has_offsets |= block->has_offset;
  types.group = std::min(types.group, block->group);
  types.fits_4_bits &= fits_4_bits(*block);
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
  const int64_t group = share_codes ? std::min(routed.group, shared.group) : routed.group;
  const bool fits = routed.fits_4_bits && (!share_codes || shared.fits_4_bits);
  form.routed = fits ? DType::kI4 : DType::kI8;
  if (share_codes) form.shared = form.routed;
  const bool offsets = routed.has_offsets || (share_codes && shared.has_offsets);
  form.quant = {.weights = WeightScale::kBlock,
                .block_rows = 1,
                .block_cols = group,
                .signed_scales = true,
                .zeros = offsets ? WeightZero::kOffset : WeightZero::kNone};
  return form;
}

}  // namespace conclave::inline v0::checkpoint
