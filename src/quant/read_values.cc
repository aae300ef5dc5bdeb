#include "core/located.h"
#include "core/weight_types.h"
#include "quant/code_meaning.h"
#include "quant/planes.h"
#include "quant/weight_format.h"

#include "conclave/error.h"
#include "conclave/quantise.h"

#include <string>
#include <vector>

namespace conclave::inline v0 {
namespace {

// The place in a row of scales for each column of the block.
std::vector<int64_t> groups_of(const QuantSpec& quant, const WeightInfo& info,
                               const WeightBlock& block, const CodeMeaning& meaning) {
  const quant::PlaneShape plane =
      quant::plane_of(WeightPlane::kScale, info.dtype, quant, info.rows, info.cols);
  const int64_t first = block.col_begin / plane.block_cols;
  std::vector<int64_t> groups;
  for (int64_t col = block.col_begin; col < block.col_end; ++col) {
    const auto at = static_cast<size_t>(col - block.col_begin);
    groups.push_back(meaning.order.empty() ? col / plane.block_cols - first
                                           : int64_t{meaning.order[at]});
  }
  return groups;
}

}  // namespace

void read_values(const QuantSpec& quant, const WeightSource& source, WeightId matrix,
                 int64_t expert, const WeightBlock& block, std::span<float> values) {
  const WeightInfo info = source.describe(matrix);
  const quant::WeightFormat* const format = quant::find_format(info.dtype);
  if (format == nullptr) {
    throw Error(ErrorCode::kTensorDType, located(source.locate(matrix, expert),
                                                 {.what = "a type that is no form of weights",
                                                  .expected = quant::known_formats(true),
                                                  .found = std::string(to_string(info.dtype))}));
  }
  const int64_t rows = block.row_end - block.row_begin;
  const int64_t cols = block.col_end - block.col_begin;
  const int64_t row_bytes = packed_bytes(info.dtype, cols);
  std::vector<std::byte> stored(static_cast<size_t>(rows * row_bytes));
  source.read(matrix, expert, block, stored);
  for (int64_t row = 0; row < rows; ++row) {
    format->decode(stored.data() + row * row_bytes, 0, cols, values.data() + row * cols);
  }
  if (is_plain(info.dtype)) return;

  const CodeMeaning meaning = load_meaning(quant, source, matrix, expert, block);
  const std::vector<int64_t> groups = groups_of(quant, info, block, meaning);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      float& value = values[static_cast<size_t>(row * cols + col)];
      const auto at = static_cast<size_t>(row * meaning.groups + groups[static_cast<size_t>(col)]);
      double exact = double{value} * double{meaning.scales[at]};
      if (!meaning.offsets.empty()) exact -= double{meaning.offsets[at]};
      if (!meaning.factors.empty()) exact *= double{meaning.factors[static_cast<size_t>(col)]};
      value = static_cast<float>(exact);
    }
  }
}

}  // namespace conclave::inline v0
