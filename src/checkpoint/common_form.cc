#include "checkpoint/common_form.h"

#include "core/weight_types.h"
#include "quant/activation_rows.h"
#include "quant/weight_format.h"

#include <algorithm>
#include <numeric>
#include <optional>

namespace conclave::inline v0::checkpoint {
namespace {

// The type that the codes are known to have the values of.
DType known_type(const MatrixMeaning& meaning) {
  return meaning.quant.gate_up_codes.dtype.value_or(meaning.element);
}

// The narrowest of some types whose codes have all values; nothing if there is none.
std::optional<DType> common_type(const Catalog<quant::WeightFormat>& catalog,
                                 std::span<const MatrixMeaning> meanings,
                                 DType (*type_of)(const MatrixMeaning& meaning)) {
  std::optional<DType> found;
  for (const quant::WeightFormat& format : catalog.rows()) {
    if (format.codes == nullptr) continue;
    if (found && bit_size(*found) <= bit_size(format.element)) continue;
    const bool fits = std::ranges::all_of(meanings, [&](const MatrixMeaning& meaning) {
      const DType type = type_of(meaning);
      return type == format.element || quant::has_values_of(format.element, type);
    });
    if (fits) found = format.element;
  }
  return found;
}

// Blocks so small that each lies in one block of either; 0 rows or columns mean all.
struct Block {
  int64_t rows = 0;
  int64_t cols = 0;
};
Block block_of(const QuantSpec& quant) {
  switch (quant.weights) {
    case WeightScale::kBlock:
      return {quant.block_rows, quant.block_cols};
    case WeightScale::kChannel:
      return {1, 0};
    case WeightScale::kTensor:
    case WeightScale::kNone:
      break;
  }
  return {};
}

void set_scales(const Block& block, QuantSpec& quant) {
  if (block.cols == 0) {
    quant.weights = block.rows == 0 ? WeightScale::kTensor : WeightScale::kChannel;
    return;
  }
  quant.weights = WeightScale::kBlock;
  quant.block_rows = block.rows;
  quant.block_cols = block.cols;
}

bool has_rows(const MatrixMeaning& meaning) {
  return meaning.quant.activations != ActivationScale::kNone;
}

// The type that rows beside these matrices are codes of.
DType row_type(const MatrixMeaning& meaning) {
  return quant::activation_rule(meaning.element, meaning.quant).codes->element;
}

// Rows stay codes if all ask for the same, of a type that may stand beside the common codes.
bool same_rows(std::span<const MatrixMeaning> meanings, DType element) {
  const QuantSpec& first = meanings.front().quant;
  const DType rows = row_type(meanings.front());
  if (first.activation_scale_rule == RowScaleRule::kQuotient &&
      !quant::takes_quotient_rows(element, rows)) {
    return false;
  }
  return std::ranges::all_of(meanings, [&](const MatrixMeaning& meaning) {
    const QuantSpec& own = meaning.quant;
    return !is_plain(meaning.element) && own.activations == first.activations &&
           own.activation_group == first.activation_group &&
           own.activation_scale_rule == first.activation_scale_rule &&
           own.power_of_two_scales == first.power_of_two_scales && row_type(meaning) == rows;
  });
}

}  // namespace

CommonForm common_form(std::span<const MatrixMeaning> meanings) {
  const MatrixMeaning& first = meanings.front();
  if (meanings.size() == 1) return {.meaning = first};
  const bool any_rows = std::ranges::any_of(meanings, has_rows);
  const bool any_values = std::ranges::any_of(
      meanings, [](const MatrixMeaning& meaning) { return is_plain(meaning.element); });
  const std::optional<DType> type =
      any_values ? std::nullopt
                 : common_type(quant::format_catalog(), meanings,
                               [](const MatrixMeaning& meaning) { return meaning.element; });
  if (!type) return {.meaning = {.element = DType::kF32}, .keeps_rows = !any_rows};

  CommonForm common{.meaning = {.element = *type}};
  QuantSpec& quant = common.meaning.quant;
  Block block;
  for (const MatrixMeaning& meaning : meanings) {
    const Block own = block_of(meaning.quant);
    block = {std::gcd(block.rows, own.rows), std::gcd(block.cols, own.cols)};
    if (meaning.quant.zeros != WeightZero::kNone) quant.zeros = WeightZero::kOffset;
    quant.signed_scales |= meaning.quant.signed_scales;
    quant.has_column_order |= meaning.quant.has_column_order;
    quant.has_column_factors |= meaning.quant.has_column_factors;
  }
  // A block that spans all columns becomes per-row scales.
  if (block.cols == 0 && block.rows != 0) block.rows = 1;
  if (block.cols != 0 && block.rows == 0) block.rows = 1;
  set_scales(block, quant);
  if (!same_rows(meanings, *type)) {
    common.keeps_rows = !any_rows;
    return common;
  }
  quant.activations = first.quant.activations;
  quant.activation_group = first.quant.activation_group;
  quant.activation_scale_rule = first.quant.activation_scale_rule;
  quant.power_of_two_scales = first.quant.power_of_two_scales;
  const DType rows = row_type(first);
  if (rows != quant::format_of(*type).row_codes->element) quant.activation_dtype = rows;
  return common;
}

MatrixCodes known_codes(std::span<const MatrixMeaning> meanings, const MatrixMeaning& layer) {
  MatrixCodes known;
  if (meanings.empty() || is_plain(layer.element)) return known;
  const MatrixMeaning own = common_form(meanings).meaning;
  if (is_plain(own.element)) return known;
  const std::optional<DType> type = meanings.size() == 1
                                        ? known_type(meanings.front())
                                        : common_type(quant::panel_catalog(), meanings, known_type);
  const bool has_fewer_bits = type && bit_size(*type) < bit_size(layer.element);
  if (has_fewer_bits && quant::has_values_of(layer.element, *type)) known.dtype = type;
  const QuantSpec& quant = layer.quant;
  const bool has_groups = quant.weights == WeightScale::kBlock && quant.block_rows == 1 &&
                          !quant.has_column_order && own.quant.weights == WeightScale::kBlock;
  if (has_groups && own.quant.block_cols != quant.block_cols) {
    known.block_cols = own.quant.block_cols;
  }
  known.has_zeros = quant.zeros == WeightZero::kNone || own.quant.zeros != WeightZero::kNone;
  return known;
}

}  // namespace conclave::inline v0::checkpoint
