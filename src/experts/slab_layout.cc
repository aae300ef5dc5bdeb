#include "experts/slab_layout.h"

#include "core/float_convert.h"
#include "core/quant_spec.h"
#include "core/row_stride.h"
#include "core/weight_types.h"
#include "gemm/pack_by_lanes.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

namespace conclave::inline v0::experts {
namespace {

// Rows [first, first + limit) of a matrix and of its bias that exist become panel columns from
// `column` on.
struct ColumnRange {
  int64_t first = 0;
  int64_t limit = 0;
  int64_t column = 0;
};

using PanelBiases = std::array<float, gemm::kPanelColumns>;

struct PanelSources {
  gemm::PanelColumns columns{};
  gemm::PanelNumbers scales{};
  gemm::PanelNumbers offsets{};
  PanelBiases biases{};
};

const std::byte* matrix_row(const ConstTensorView& matrix, int64_t row) {
  const int64_t stride = row_stride(matrix);
  return static_cast<const std::byte*>(matrix.data) + row * packed_bytes(matrix.dtype, stride);
}

float bias_value(const ConstTensorView& bias, int64_t index) {
  const auto* element = static_cast<const std::byte*>(bias.data) + index * byte_size(bias.dtype);
  if (bias.dtype == DType::kF32) {
    float value;
    std::memcpy(&value, element, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, element, sizeof(bits));
  return bias.dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// The float32 numbers of a row; null if there are none.
const float* row_numbers(const ConstTensorView& numbers, int64_t row) {
  if (numbers.empty()) return nullptr;
  return static_cast<const float*>(numbers.data) + row * numbers.shape[1];
}

void take_rows(const ExpertMatrix& matrix, const ColumnRange& range, PanelSources& sources) {
  const int64_t count = std::min(range.limit, matrix.weights.shape[0] - range.first);
  for (int64_t i = 0; i < count; ++i) {
    const auto column = static_cast<size_t>(range.column + i);
    const int64_t row = range.first + i;
    sources.columns[column] = matrix_row(matrix.weights, row);
    sources.scales[column] = row_numbers(matrix.scale, row);
    sources.offsets[column] = row_numbers(matrix.offset, row);
    if (!matrix.bias.empty()) sources.biases[column] = bias_value(matrix.bias, row);
  }
}

PanelSources gate_up_sources(const ExpertMatrices& expert, int64_t panel, bool gated) {
  const int64_t width = gated ? gemm::kPanelColumns / 2 : gemm::kPanelColumns;
  PanelSources sources;
  if (gated) take_rows(expert.gate, {panel * width, width, 0}, sources);
  take_rows(expert.up, {panel * width, width, gated ? width : 0}, sources);
  return sources;
}

PanelSources down_sources(const ExpertMatrices& expert, int64_t panel) {
  PanelSources sources;
  take_rows(expert.down, {panel * gemm::kPanelColumns, gemm::kPanelColumns, 0}, sources);
  return sources;
}

// Neighbouring k that share a scale.
int64_t scale_width(const QuantSpec& quant, int64_t k) {
  if (quant.weights == WeightScale::kNone) return 0;
  return quant.weights == WeightScale::kBlock ? quant.block_cols : std::max<int64_t>(k, 1);
}

// Groups of the columns of a whole matrix, where an order names them.
int64_t ordered_groups(const QuantSpec& quant, int64_t columns) {
  return quant.has_column_order ? ceil_div(columns, quant.block_cols) : 0;
}

// A panel has no form of e4m3, which a global scale makes float32 numbers.
ScaleValues held(ScaleValues values) {
  return values == ScaleValues::kFloat8 ? ScaleValues::kFloat : values;
}

// `whole_k` columns are those of all ranks.
gemm::PanelLayout panels_of(const MatrixForm& form, int64_t k, int64_t whole_k) {
  const QuantSpec& quant = form.quant;
  return {.dtype = form.dtype,
          .k = k,
          .scale_width = scale_width(quant, k),
          .has_offsets = quant.zeros != WeightZero::kNone,
          .ordered_groups = ordered_groups(quant, whole_k),
          .scale_values = held(quant.scale_values),
          .offset_values = quant.zero_values};
}

size_t order_bytes(const gemm::PanelLayout& panel) {
  return panel.ordered_groups == 0 ? 0 : static_cast<size_t>(panel.k) * sizeof(int32_t);
}

[[noreturn]] void refuse(const gemm::PanelLayout& layout, const gemm::UnfitNumber& unfit) {
  const auto kind = [](ScaleValues values) -> std::string_view {
    switch (values) {
      case ScaleValues::kF16:
        return "float16 numbers";
      case ScaleValues::kPowerOfTwo:
        return "powers of two from 2^-127 to 2^127";
      case ScaleValues::kSteps:
        return "whole multiples, from -128 to 127, of one number for 256 columns";
      case ScaleValues::kFloat8:
      case ScaleValues::kFloat:
        break;
    }
    return "float32 numbers";
  };
  std::string expected(kind(layout.scale_values));
  if (layout.has_offsets) expected += fmt::format(", and zeros: {}", kind(layout.offset_values));
  throw Error(ErrorCode::kTensorValue,
              {.what = "a scale or zero is none that the layer holds",
               .expected = std::move(expected),
               .found = fmt::format("{}", unfit.value),
               .hint = "a layer holds any if it is made with ScaleValues::kFloat of a source of "
                       "float32 scales"});
}

// Writes an order or factors. A slab that gets no table may be absent.
void write_table(const ConstTensorView& table, std::byte* slab, size_t offset) {
  static_assert(sizeof(int32_t) == sizeof(float));
  if (table.empty()) return;
  std::memcpy(slab + offset, table.data, static_cast<size_t>(table.shape[1]) * sizeof(int32_t));
}

}  // namespace

SlabLayout::SlabLayout(const ExpertsProblem& problem)
    : hidden_size(problem.hidden_size),
      intermediate_size(problem.intermediate_size),
      gated(problem.activation.gated),
      has_bias(problem.has_bias),
      has_factors(problem.quant.has_column_factors),
      gate_up(panels_of(gate_up_form(problem.weight_dtype, problem.quant), problem.hidden_size,
                        problem.hidden_size)),
      down(panels_of(down_form(problem.weight_dtype, problem.quant), problem.intermediate_size,
                     std::max(problem.whole_intermediate_size, problem.intermediate_size))) {
  down.scale_skip = problem.skipped_columns;
}

SlabPlaces SlabLayout::places(const gemm::PanelLayout& panel, int64_t num_panels,
                              size_t num_orders) const {
  constexpr int64_t kAlignment = 64;
  SlabPlaces places{.stride = stride(panel)};
  if (has_bias) places.biases = panel.panel_bytes();
  size_t end = static_cast<size_t>(num_panels) * places.stride;
  if (panel.ordered_groups != 0) {
    places.lower_order = end;
    places.upper_order = end + (num_orders - 1) * order_bytes(panel);
    end += num_orders * order_bytes(panel);
  }
  if (has_factors) {
    places.factors = end;
    end += static_cast<size_t>(panel.k) * sizeof(float);
  }
  places.slab_bytes = static_cast<size_t>(round_up(static_cast<int64_t>(end), kAlignment));
  return places;
}

std::string SlabLayout::name() const {
  const std::string variant = std::string(gated ? "" : ".single") + (has_bias ? ".bias" : "") +
                              (has_factors ? ".factors" : "");
  const std::string of_gate_up = gemm::layout_name(gate_up, variant);
  const std::string of_down = gemm::layout_name(down, variant);
  return of_gate_up == of_down ? of_gate_up : of_gate_up + ", down " + of_down;
}

void SlabLayout::pack(const ExpertMatrices& expert, std::byte* gate_up_slab, std::byte* down_slab,
                      const gemm::PackFunctions& functions) const {
  const auto write = [&](const gemm::PanelLayout& layout, const auto& sources_of, int64_t columns,
                         int64_t rows, std::byte* slab) {
    const int64_t num_panels = ceil_div(rows, columns);
    if (num_panels == 0) return;
    PanelSources sources = sources_of(0);
    for (int64_t index = 0; index < num_panels; ++index) {
      const PanelSources next = index + 1 < num_panels ? sources_of(index + 1) : PanelSources{};
      std::byte* const panel = slab + static_cast<size_t>(index) * stride(layout);
      const gemm::UnfitNumber unfit = gemm::pack_panel_by_lanes(
          layout, sources.columns, next.columns, functions, panel, sources.scales, sources.offsets);
      if (unfit.column >= 0) refuse(layout, unfit);
      if (has_bias) std::memcpy(panel + layout.panel_bytes(), sources.biases.data(), kBiasBytes);
      sources = next;
    }
  };
  write(
      gate_up, [&](int64_t panel) { return gate_up_sources(expert, panel, gated); },
      gate_up_columns(), expert.up.weights.shape[0], gate_up_slab);
  write(
      down, [&](int64_t panel) { return down_sources(expert, panel); }, gemm::kPanelColumns,
      expert.down.weights.shape[0], down_slab);
  const SlabPlaces gate_up_at = gate_up_places();
  const SlabPlaces down_at = down_places();
  write_table(expert.up.factor, gate_up_slab, gate_up_at.factors);
  write_table(expert.down.factor, down_slab, down_at.factors);
  write_table(expert.gate.order, gate_up_slab, gate_up_at.lower_order);
  write_table(expert.up.order, gate_up_slab, gate_up_at.upper_order);
  write_table(expert.down.order, down_slab, down_at.lower_order);
}

void SlabLayout::make_gate_up_panel(const PanelInPlace& panel, gemm::TransposeFunction transpose,
                                    std::byte* to) const noexcept {
  const PanelSources sources = gate_up_sources(panel.expert, panel.index, gated);
  gemm::PanelColumns next{};
  if (panel.next_expert != nullptr) {
    next = gate_up_sources(*panel.next_expert, panel.next_index, gated).columns;
  }
  gemm::pack_values(gate_up, sources.columns, next, transpose, to);
  if (has_bias) std::memcpy(to + gate_up.panel_bytes(), sources.biases.data(), kBiasBytes);
}

void SlabLayout::make_down_panel(const PanelInPlace& panel, gemm::TransposeFunction transpose,
                                 std::byte* to) const noexcept {
  const PanelSources sources = down_sources(panel.expert, panel.index);
  gemm::PanelColumns next{};
  if (panel.next_expert != nullptr) {
    next = down_sources(*panel.next_expert, panel.next_index).columns;
  }
  gemm::pack_values(down, sources.columns, next, transpose, to);
  if (has_bias) std::memcpy(to + down.panel_bytes(), sources.biases.data(), kBiasBytes);
}

size_t SlabLayout::panel_room() const {
  return static_cast<size_t>(
      round_up(static_cast<int64_t>(std::max(stride(gate_up), stride(down))), 64));
}

}  // namespace conclave::inline v0::experts
