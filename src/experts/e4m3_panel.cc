#include "experts/e4m3_panel.h"

#include "core/checked.h"
#include "core/float8.h"
#include "core/float_convert.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace conclave::inline v0::experts {
namespace {

constexpr int64_t kAlignment = 64;
constexpr auto kLanes = static_cast<size_t>(kE4m3PanelRows);

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

using Lanes = std::array<float, kLanes>;

const std::array<float, 256>& code_values() {
  static const std::array<float, 256> kValues = [] {
    std::array<float, 256> values{};
    for (size_t code = 0; code < values.size(); ++code) {
      values[code] = e4m3_to_float(static_cast<uint8_t>(code));
    }
    return values;
  }();
  return kValues;
}

void add_plain(const E4m3PanelTask& task, const float* values, Lanes& sums) {
  const auto& table = code_values();
  const E4m3PanelLayout& layout = task.layout;
  for (int64_t k = 0; k < layout.cols; ++k) {
    const float* scales = task.panel_scales + k / layout.group_width * kE4m3PanelRows;
    const std::byte* codes = task.panel + k * kE4m3PanelRows;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const float weight = table[static_cast<size_t>(codes[lane])] * scales[lane];
      sums[lane] = std::fma(values[k], weight, sums[lane]);
    }
  }
}

void add_quantised(const E4m3PanelTask& task, const float* values, const float* steps,
                   Lanes& sums) {
  const auto& table = code_values();
  const E4m3PanelLayout& layout = task.layout;
  const auto next = [](int64_t begin, int64_t width) { return (begin / width + 1) * width; };
  for (int64_t begin = 0; begin < layout.cols;) {
    const int64_t end =
        std::min({layout.cols, next(begin, layout.group_width), next(begin, task.scale_width)});
    Lanes partial{};
    for (int64_t k = begin; k < end; ++k) {
      const std::byte* codes = task.panel + k * kE4m3PanelRows;
      for (size_t lane = 0; lane < kLanes; ++lane) {
        // The product is exact: two codes have eight significant bits together.
        partial[lane] += values[k] * table[static_cast<size_t>(codes[lane])];
      }
    }
    const float step = steps[begin / task.scale_width];
    const float* scales = task.panel_scales + begin / layout.group_width * kE4m3PanelRows;
    for (size_t lane = 0; lane < kLanes; ++lane) sums[lane] += partial[lane] * step * scales[lane];
    begin = end;
  }
}

}  // namespace

int64_t E4m3PanelLayout::num_groups() const { return ceil_div(cols, group_width); }

size_t E4m3PanelLayout::code_bytes() const {
  return static_cast<size_t>(round_up(cols * kE4m3PanelRows, kAlignment));
}

size_t E4m3PanelLayout::bytes() const {
  return code_bytes() + static_cast<size_t>(num_groups() + 1) * kLanes * sizeof(float);
}

E4m3PanelLayout e4m3_panel_layout(const QuantSpec& quant, int64_t cols) {
  const bool in_blocks = quant.weights == WeightScale::kBlock;
  return {.cols = cols, .group_width = in_blocks ? quant.block_cols : std::max<int64_t>(cols, 1)};
}

void pack_e4m3_panel(const E4m3PanelLayout& layout, const E4m3Rows& rows, int64_t first,
                     std::byte* panel) {
  std::memset(panel, 0, layout.bytes());
  auto* scales = static_cast<float*>(static_cast<void*>(panel + layout.code_bytes()));
  float* biases = scales + layout.num_groups() * kE4m3PanelRows;
  const ConstTensorView& matrix = rows.matrix;
  const int64_t stride = matrix.row_stride != 0 ? matrix.row_stride : matrix.shape[1];
  const int64_t count = std::min(kE4m3PanelRows, matrix.shape[0] - first);
  for (int64_t lane = 0; lane < count; ++lane) {
    const int64_t row = first + lane;
    if (!rows.bias.empty()) biases[lane] = element(rows.bias, row);
    // A slice without columns has no memory to read.
    if (layout.cols == 0) continue;
    const auto* codes = static_cast<const std::byte*>(matrix.data) + row * stride;
    for (int64_t k = 0; k < layout.cols; ++k) panel[k * kE4m3PanelRows + lane] = codes[k];
    const auto* of_row = static_cast<const float*>(rows.scales.data) + row * layout.num_groups();
    for (int64_t group = 0; group < layout.num_groups(); ++group) {
      scales[group * kE4m3PanelRows + lane] = of_row[group];
    }
  }
}

void set_panel(const std::byte* panel, E4m3PanelTask& task) {
  task.panel = panel;
  task.panel_scales =
      static_cast<const float*>(static_cast<const void*>(panel + task.layout.code_bytes()));
  task.panel_biases = task.panel_scales + task.layout.num_groups() * kE4m3PanelRows;
}

void reference_e4m3_product(const E4m3PanelTask& task) noexcept {
  for (int64_t row = 0; row < task.num_rows; ++row) {
    const float* values = task.values + row * task.stride;
    Lanes sums{};
    if (task.scales == nullptr) {
      add_plain(task, values, sums);
    } else {
      add_quantised(task, values, task.scales + row * task.stride, sums);
    }
    float* out = task.out + row * kE4m3PanelRows;
    for (size_t lane = 0; lane < kLanes; ++lane) out[lane] = sums[lane] + task.panel_biases[lane];
  }
}

}  // namespace conclave::inline v0::experts
