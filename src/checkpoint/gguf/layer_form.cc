#include "checkpoint/gguf/layer_form.h"

#include "checkpoint/gguf/row_reader.h"
#include "quant/gguf/block_type.h"

#include "conclave/gguf.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {
namespace checkpoint {
namespace {

constexpr std::array kGateUp = {WeightMatrix::kGate, WeightMatrix::kUp};
constexpr std::array kDown = {WeightMatrix::kDown};

using Blocks = std::vector<const quant::BlockType*>;

// The types of some matrices, seen together.
struct StoredTypes {
  bool are_there = false;
  std::optional<DType> plain;  // if all have it
  bool all_blocks = true;
  Blocks blocks;

  void add(const io::GgufType& type) {
    const std::optional<DType> own = plain_type(type);
    plain = !are_there || plain == own ? own : std::nullopt;
    are_there = true;
    const quant::BlockType* const block = quant::find_block_type(type.name);
    all_blocks &= block != nullptr;
    if (block != nullptr) blocks.push_back(block);
  }
};

StoredTypes types_of(const GgufLayer& layer, WeightMlp mlp,
                     std::span<const WeightMatrix> matrices) {
  StoredTypes types;
  for (const WeightMatrix matrix : matrices) {
    for (const GgufMatrix& stored : layer.stored[{mlp, matrix}].matrices) {
      types.add(*stored.place.tensor->type);
    }
  }
  return types;
}

Blocks both(Blocks blocks, const Blocks& others) {
  blocks.insert(blocks.end(), others.begin(), others.end());
  return blocks;
}

template <class Predicate>
bool all_are(const Blocks& blocks, const Predicate& predicate) {
  return std::ranges::all_of(blocks,
                             [&](const quant::BlockType* block) { return predicate(*block); });
}

// The member that all have; nothing if they differ.
template <class Member>
std::optional<Member> common(const Blocks& blocks, Member quant::BlockType::*member) {
  const Member first = blocks.front()->*member;
  const bool same =
      all_are(blocks, [&](const quant::BlockType& block) { return block.*member == first; });
  return same ? std::optional(first) : std::nullopt;
}

// The narrowest type that has all codes of the blocks.
DType codes_of(const Blocks& blocks) {
  if (!all_are(blocks, fits_4_bits)) {
    const auto element = common(blocks, &quant::BlockType::element);
    return element && *element ? **element : DType::kI8;
  }
  const auto held = [&](DType codes) {
    return all_are(blocks,
                   [&](const quant::BlockType& block) { return holds_codes(codes, block); });
  };
  return !held(DType::kI4) && held(DType::kU4) ? DType::kU4 : DType::kI4;
}

int64_t group_of(const Blocks& blocks) {
  return (*std::ranges::min_element(blocks, {}, &quant::BlockType::group))->group;
}

bool have_offsets(const Blocks& blocks) {
  return std::ranges::any_of(blocks, &quant::BlockType::has_offset);
}

ScaleValues scale_values(const Blocks& blocks) {
  return common(blocks, &quant::BlockType::scale_values).value_or(ScaleValues::kFloat);
}

// Offsets take up what is taken off codes, as a product with the scale.
ScaleValues zero_values(const Blocks& blocks, DType codes) {
  const bool have_others = std::ranges::any_of(
      blocks, [&](const quant::BlockType* block) { return lowers_codes(codes, *block); });
  return have_offsets(blocks) && !have_others ? scale_values(blocks) : ScaleValues::kFloat;
}

QuantSpec scales_of(const Blocks& blocks, DType codes) {
  return {.weights = WeightScale::kBlock,
          .block_rows = 1,
          .block_cols = group_of(blocks),
          .signed_scales = true,
          .scale_values = scale_values(blocks),
          .zeros = have_offsets(blocks) ? WeightZero::kOffset : WeightZero::kNone,
          .zero_values = zero_values(blocks, codes)};
}

// The narrowest type that a CPU packs and that has all codes of the blocks.
DType packed_codes_of(const Blocks& blocks) {
  const DType codes = codes_of(blocks);
  if (bit_size(codes) <= bit_size(DType::kI6)) return codes;
  const bool fit_6_bits =
      all_are(blocks, [](const quant::BlockType& block) { return holds_codes(DType::kI6, block); });
  return fit_6_bits ? DType::kI6 : codes;
}

// The same, or the narrowest that a GPU holds, which has the scales and offsets of one type.
DType narrow_codes_of(const Blocks& blocks) {
  const bool fit_2_bits = all_are(blocks, [&](const quant::BlockType& block) {
    return &block == blocks.front() && block.has_offset && block.group == 16 &&
           block.scale_values == ScaleValues::kSteps && holds_codes(DType::kU2, block);
  });
  return fit_2_bits ? DType::kU2 : packed_codes_of(blocks);
}

// Matrices with some of the blocks of a layer may be known to have less than its form.
MatrixCodes known_of(const Blocks& blocks, DType codes, const QuantSpec& layer) {
  MatrixCodes known;
  if (blocks.empty()) return known;
  const DType own = narrow_codes_of(blocks);
  const bool is_held =
      all_are(blocks, [&](const quant::BlockType& block) { return holds_codes(own, block); });
  if (bit_size(own) < bit_size(codes) && is_held) known.dtype = own;
  const QuantSpec of_own = scales_of(blocks, codes);
  if (of_own.block_cols != layer.block_cols) known.block_cols = of_own.block_cols;
  known.has_zeros = layer.zeros == WeightZero::kNone || have_offsets(blocks);
  if (of_own.scale_values != layer.scale_values) known.scale_values = of_own.scale_values;
  if (of_own.zero_values != layer.zero_values) known.zero_values = of_own.zero_values;
  return known;
}

// The weights of a layer with blocks of these kinds.
struct CodedForm {
  DType dtype = DType::kF32;
  QuantSpec quant = {};
};
CodedForm form_of_blocks(const Blocks& gate_up, const Blocks& down) {
  const Blocks all = both(gate_up, down);
  CodedForm form{.dtype = codes_of(all)};
  const QuantSpec layer = scales_of(all, form.dtype);
  form.quant = layer;
  form.quant.gate_up_codes = known_of(gate_up, form.dtype, layer);
  form.quant.down_codes = known_of(down, form.dtype, layer);
  return form;
}

bool has_factors(const GgufLayer& layer) {
  return layer.gate_factor.place || layer.up_factor.place || layer.down_factor.place;
}

// A factor times a number that takes few bits takes more.
void widen_numbers(QuantSpec& quant) {
  const auto widen = [](auto& numbers) {
    numbers.scale_values = ScaleValues::kFloat;
    numbers.zero_values = ScaleValues::kFloat;
  };
  widen(quant);
  widen(quant.gate_up_codes);
  widen(quant.down_codes);
}

}  // namespace

GgufForm form_of(const GgufLayer& layer) {
  constexpr std::array kAll = {WeightMatrix::kGate, WeightMatrix::kUp, WeightMatrix::kDown};
  const StoredTypes routed = types_of(layer, WeightMlp::kRouted, kAll);
  const StoredTypes shared = types_of(layer, WeightMlp::kShared, kAll);
  GgufForm form;
  form.residual = types_of(layer, WeightMlp::kResidual, kAll).plain.value_or(DType::kF32);
  form.shared = shared.plain.value_or(DType::kF32);
  if (!routed.all_blocks || routed.blocks.empty()) {
    form.routed = has_factors(layer) ? DType::kF32 : routed.plain.value_or(DType::kF32);
    return form;
  }
  const bool share_codes = shared.are_there && shared.all_blocks;
  const auto blocks_of = [&](std::span<const WeightMatrix> matrices) {
    const Blocks own = types_of(layer, WeightMlp::kRouted, matrices).blocks;
    if (!share_codes) return own;
    return both(own, types_of(layer, WeightMlp::kShared, matrices).blocks);
  };
  const CodedForm coded = form_of_blocks(blocks_of(kGateUp), blocks_of(kDown));
  form.routed = coded.dtype;
  if (share_codes) form.shared = coded.dtype;
  form.quant = coded.quant;
  if (has_factors(layer)) widen_numbers(form.quant);
  return form;
}

}  // namespace checkpoint

std::vector<WeightForm> gguf_block_forms() {
  std::vector<WeightForm> forms;
  for (const quant::BlockType& block : quant::block_types()) {
    const checkpoint::CodedForm form = checkpoint::form_of_blocks({&block}, {&block});
    forms.push_back({.name = block.name, .dtype = form.dtype, .quant = form.quant});
  }
  return forms;
}

std::vector<WeightForm> gguf_mixed_forms() {
  struct Mix {
    std::string_view name, gate_up, down;
  };
  constexpr std::array kMixes = {
      Mix{"Q3_K+Q5_K", "Q3_K", "Q5_K"}, Mix{"Q4_K+Q5_0", "Q4_K", "Q5_0"},
      Mix{"Q4_K+Q6_K", "Q4_K", "Q6_K"}, Mix{"Q4_K+Q8_0", "Q4_K", "Q8_0"},
      Mix{"Q5_K+Q6_K", "Q5_K", "Q6_K"}, Mix{"IQ4_XS+Q5_K", "IQ4_XS", "Q5_K"}};
  std::vector<WeightForm> forms;
  for (const Mix& mix : kMixes) {
    const checkpoint::CodedForm form = checkpoint::form_of_blocks(
        {quant::find_block_type(mix.gate_up)}, {quant::find_block_type(mix.down)});
    forms.push_back({.name = mix.name, .dtype = form.dtype, .quant = form.quant});
  }
  return forms;
}

}  // namespace conclave::inline v0
