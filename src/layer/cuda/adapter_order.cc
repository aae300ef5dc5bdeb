#include "layer/cuda/adapter_order.h"

#include "core/row_stride.h"

#include <cstddef>
#include <cstring>
#include <utility>

namespace conclave::inline v0 {
namespace {

const std::byte* element(const ConstTensorView& view, int64_t row, int64_t column) {
  return static_cast<const std::byte*>(view.data) +
         (row * row_stride(view) + column) * byte_size(view.dtype);
}

Tensor zeros(DType dtype, int64_t rows, int64_t columns) {
  Tensor made(dtype, {rows, columns});
  std::memset(made.as<std::byte>(), 0, made.size_bytes());
  return made;
}

Tensor ordered_rows(const ConstTensorView& from, std::span<const int32_t> rows) {
  Tensor made = zeros(from.dtype, std::ssize(rows), from.shape[1]);
  const auto bytes = static_cast<size_t>(from.shape[1] * byte_size(from.dtype));
  for (size_t place = 0; place < rows.size(); ++place) {
    if (rows[place] < 0) continue;
    std::memcpy(made.as<std::byte>() + place * bytes, element(from, rows[place], 0), bytes);
  }
  return made;
}

Tensor ordered_columns(const ConstTensorView& from, std::span<const int32_t> columns) {
  Tensor made = zeros(from.dtype, from.shape[0], std::ssize(columns));
  const auto bytes = static_cast<size_t>(byte_size(from.dtype));
  std::byte* to = made.as<std::byte>();
  for (int64_t row = 0; row < from.shape[0]; ++row) {
    for (const int32_t column : columns) {
      if (column >= 0) std::memcpy(to, element(from, row, column), bytes);
      to += bytes;
    }
  }
  return made;
}

}  // namespace

OrderedPart order_factors(const AdapterPart& part, std::span<const int32_t> columns,
                          int64_t inner) {
  OrderedPart ordered{.part = part, .memory = {}};
  ordered.part.shape.intermediate_size = inner;
  const auto keep = [&](Tensor tensor) {
    ordered.memory.push_back(std::move(tensor));
    return ordered.memory.back().const_view();
  };
  for (size_t i = 0; i < part.experts.size(); ++i) {
    const std::span<const int32_t> order =
        columns.subspan(i * static_cast<size_t>(inner), static_cast<size_t>(inner));
    experts::ExpertAdapter& expert = ordered.part.experts[i];
    for (experts::MatrixFactors* factors : {&expert.gate, &expert.up}) {
      if (!factors->empty()) factors->b = keep(ordered_rows(factors->b, order));
    }
    if (!expert.down.empty()) expert.down.a = keep(ordered_columns(expert.down.a, order));
  }
  return ordered;
}

}  // namespace conclave::inline v0
