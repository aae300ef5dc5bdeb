#include "experts/reference/e4m3_rows.h"

#include "core/checked.h"
#include "core/float8.h"
#include "core/float_convert.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace conclave::inline v0::experts {
namespace {

constexpr int64_t kAlignment = 16;

using CodeTable = std::array<float, 256>;
const CodeTable& code_values() {
  static const CodeTable kValues = [] {
    CodeTable values;
    for (size_t code = 0; code < values.size(); ++code) {
      values[code] = e4m3_to_float(static_cast<uint8_t>(code));
    }
    return values;
  }();
  return kValues;
}

float element(const ConstTensorView& vector, int64_t index) {
  const auto* bytes = static_cast<const std::byte*>(vector.data) + index * byte_size(vector.dtype);
  if (vector.dtype == DType::kF32) {
    float value;
    std::memcpy(&value, bytes, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  return vector.dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// The end of the columns from `begin` on that share the weight's scale and the row's.
int64_t segment_end(int64_t begin, int64_t cols, int64_t weight_width, int64_t row_width) {
  const auto next = [begin](int64_t width) { return (begin / width + 1) * width; };
  return std::min({cols, next(weight_width), next(row_width)});
}

float plain_product(const E4m3RowLayout& layout, const uint8_t* codes, const float* scales,
                    const float* values) {
  const CodeTable& table = code_values();
  float sum = 0;
  for (int64_t begin = 0; begin < layout.cols; begin += layout.group_width, ++scales) {
    const int64_t end = std::min(layout.cols, begin + layout.group_width);
    for (int64_t k = begin; k < end; ++k) sum = std::fma(values[k], table[codes[k]] * *scales, sum);
  }
  return sum;
}

// Products of two codes are exact in float32.
float sum_of_products(const uint8_t* codes, const float* values, int64_t count) {
  const CodeTable& table = code_values();
  float sum = 0;
  for (int64_t k = 0; k < count; ++k) sum += values[k] * table[codes[k]];
  return sum;
}

}  // namespace

int64_t E4m3RowLayout::num_groups() const { return ceil_div(cols, group_width); }

size_t E4m3RowLayout::code_bytes() const { return static_cast<size_t>(round_up(cols, kAlignment)); }

size_t E4m3RowLayout::bytes() const {
  const int64_t floats = num_groups() + 1;
  return code_bytes() + static_cast<size_t>(round_up(floats * int64_t{sizeof(float)}, kAlignment));
}

E4m3RowLayout e4m3_row_layout(const QuantSpec& quant, int64_t cols) {
  const bool in_blocks = quant.weights == WeightScale::kBlock;
  return {.cols = cols, .group_width = in_blocks ? quant.block_cols : std::max<int64_t>(cols, 1)};
}

void pack_e4m3_row(const E4m3RowLayout& layout, const ConstTensorView& matrix,
                   const ConstTensorView& scales, const ConstTensorView& bias, int64_t row,
                   std::byte* packed) {
  const auto groups = static_cast<size_t>(layout.num_groups());
  const size_t code_bytes = layout.code_bytes();
  std::memset(packed, 0, layout.bytes());
  // A slice may have no columns, and then no memory.
  if (layout.cols > 0) {
    const int64_t stride = matrix.row_stride != 0 ? matrix.row_stride : matrix.shape[1];
    const auto* codes = static_cast<const std::byte*>(matrix.data) + row * stride;
    const auto* of_row = static_cast<const float*>(scales.data) + row * layout.num_groups();
    std::memcpy(packed, codes, static_cast<size_t>(layout.cols));
    std::memcpy(packed + code_bytes, of_row, groups * sizeof(float));
  }
  const float offset = bias.empty() ? 0.0F : element(bias, row);
  std::memcpy(packed + code_bytes + groups * sizeof(float), &offset, sizeof(offset));
}

float e4m3_product(const E4m3RowLayout& layout, const std::byte* packed, const ActivationRow& row,
                   int64_t scale_width) {
  const auto* codes = static_cast<const uint8_t*>(static_cast<const void*>(packed));
  const auto* scales =
      static_cast<const float*>(static_cast<const void*>(packed + layout.code_bytes()));
  const float bias = scales[layout.num_groups()];
  if (row.scales == nullptr) return plain_product(layout, codes, scales, row.values) + bias;
  float sum = 0;
  for (int64_t begin = 0; begin < layout.cols;) {
    const int64_t end = segment_end(begin, layout.cols, layout.group_width, scale_width);
    const float partial = sum_of_products(codes + begin, row.values + begin, end - begin);
    sum += partial * row.scales[begin / scale_width] * scales[begin / layout.group_width];
    begin = end;
  }
  return sum + bias;
}

}  // namespace conclave::inline v0::experts
