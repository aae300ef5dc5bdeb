#include "layer/gate_values.h"

#include "core/row_stride.h"
#include "core/weight_types.h"
#include "quant/weight_format.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace conclave::inline v0 {
namespace {

std::vector<int64_t> rows_with_nan(const ConstTensorView& gate) {
  const quant::WeightFormat& format = quant::format_of(gate.dtype);
  const int64_t cols = gate.shape[1];
  const int64_t row_bytes = packed_bytes(gate.dtype, row_stride(gate));
  std::vector<float> values(static_cast<size_t>(cols));
  std::vector<int64_t> found;
  for (int64_t row = 0; row < gate.shape[0]; ++row) {
    format.decode(static_cast<const std::byte*>(gate.data) + row * row_bytes, 0, cols,
                  values.data());
    if (std::ranges::any_of(values, [](float value) { return std::isnan(value); })) {
      found.push_back(row);
    }
  }
  return found;
}

}  // namespace

int64_t count_nan_rows(const Context& context, const ConstTensorView& gate) {
  constexpr size_t kMostNamed = 8;
  std::vector<int64_t> rows = rows_with_nan(gate);
  if (rows.empty()) return 0;
  const size_t count = rows.size();
  rows.resize(std::min(count, kMostNamed));
  context.log(
      LogLevel::kWarning,
      fmt::format("router: {} of {} rows of the gate have NaN, {}{}: their logits compare "
                  "as -infinity, so that tokens choose other experts",
                  count, gate.shape[0], fmt::join(rows, ", "), count > kMostNamed ? ", ..." : ""));
  return static_cast<int64_t>(count);
}

}  // namespace conclave::inline v0
