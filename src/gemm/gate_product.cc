#include "gemm/gate_product.h"

#include "core/float_convert.h"
#include "core/row_stride.h"
#include "core/weight_types.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"
#include "gemm/cpu/dense_kernels.h"
#include "gemm/packed_layout.h"

#include "conclave/error.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0::gemm {
namespace {

// Rows per work item: eight full register tiles, which still leaves many items at small widths.
constexpr int64_t kRowBlock = 48;

PanelFunction choose_panel_function(cpu::Isa isa, DType weights) {
  switch (isa) {
    case cpu::Isa::kScalar:
      return dense_panel_scalar(weights);
    case cpu::Isa::kAvx2:
      return dense_panel_avx2(weights);
    default:
      return dense_panel_avx512(weights);
  }
}

void round_values(std::span<float> values, DType type) {
  if (type == DType::kBF16) {
    for (float& value : values) value = bf16_to_float(float_to_bf16(value));
  } else if (type == DType::kF16) {
    for (float& value : values) value = f16_to_float(float_to_f16(value));
  }
}

class PackedDenseProduct final : public DenseProduct {
 public:
  PackedDenseProduct(const ConstTensorView& weights, cpu::Isa isa, HostAllocator& allocator)
      : columns_(weights.shape[0]),
        layout_{.dtype = weights.dtype, .k = weights.shape[1]},
        compute_(choose_panel_function(isa, weights.dtype)),
        packed_(allocator, static_cast<size_t>(num_panels()) * layout_.panel_bytes()) {
    const int64_t stride = row_stride(weights);
    const auto* base = static_cast<const std::byte*>(weights.data);
    for (int64_t panel = 0; panel < num_panels(); ++panel) {
      PanelColumns sources{};
      for (int64_t i = 0; i < valid_columns(panel); ++i) {
        const int64_t element = (panel * kPanelColumns + i) * stride;
        sources[static_cast<size_t>(i)] =
            base + static_cast<size_t>(element) * static_cast<size_t>(byte_size(layout_.dtype));
      }
      pack_panel(layout_, sources,
                 packed_.data() + static_cast<size_t>(panel) * layout_.panel_bytes());
    }
  }

  PackedDenseProduct(const PackedMatrix& matrix, cpu::Isa isa, HostAllocator& allocator)
      : columns_(matrix.columns),
        layout_{.dtype = matrix.dtype, .k = matrix.k},
        compute_(choose_panel_function(isa, matrix.dtype)),
        packed_(allocator, static_cast<size_t>(num_panels()) * layout_.panel_bytes()) {
    if (matrix.panels.size() != packed_.size()) {
      throw Error(ErrorCode::kShape, {.what = "a packed matrix has other bytes than its panels",
                                      .expected = std::to_string(packed_.size()),
                                      .found = std::to_string(matrix.panels.size())});
    }
    std::ranges::copy(matrix.panels, packed_.data());
  }

  PackedDenseProduct(const PackedDenseProduct& other, HostAllocator& allocator)
      : columns_(other.columns_),
        layout_(other.layout_),
        compute_(other.compute_),
        packed_(allocator, other.packed_.size()) {
    std::ranges::copy(other.packed_.span(), packed_.data());
  }

  std::unique_ptr<DenseProduct> copy(HostAllocator& allocator) const override {
    return std::make_unique<PackedDenseProduct>(*this, allocator);
  }

  PackedMatrix packed() const override {
    return {.columns = columns_, .k = layout_.k, .dtype = layout_.dtype, .panels = packed_.span()};
  }

  int64_t row_bytes() const override { return round_up(layout_.k, 16) * int64_t{sizeof(float)}; }

  void run(const RowBundle& rows, float* out, DType round_to, Executor& executor) const override {
    const int64_t items = ceil_div(rows.num_rows, kRowBlock) * num_panels();
    cpu::parallel_for(executor, items, 1, [&](int64_t begin, int64_t end, int32_t) {
      for (int64_t item = begin; item < end; ++item) run_item(rows, item, out, round_to);
    });
  }

 private:
  int64_t num_panels() const { return ceil_div(columns_, kPanelColumns); }
  int64_t valid_columns(int64_t panel) const {
    return std::min(kPanelColumns, columns_ - panel * kPanelColumns);
  }

  void run_item(const RowBundle& rows, int64_t item, float* out, DType round_to) const {
    const int64_t panel = item % num_panels();
    const int64_t first_row = item / num_panels() * kRowBlock;
    const int64_t num_rows = std::min(kRowBlock, rows.num_rows - first_row);
    float* first_out = out + first_row * columns_ + panel * kPanelColumns;
    compute_({.panel = packed_.data() + static_cast<size_t>(panel) * layout_.panel_bytes(),
              .k = layout_.k,
              .rows = rows.rows + first_row * rows.row_bytes,
              .row_bytes = rows.row_bytes,
              .num_rows = num_rows,
              .out = static_cast<std::byte*>(static_cast<void*>(first_out)),
              .out_row_bytes = columns_ * int64_t{sizeof(float)},
              .valid_columns = valid_columns(panel)});
    for (int64_t r = 0; r < num_rows; ++r) {
      round_values({first_out + r * columns_, static_cast<size_t>(valid_columns(panel))}, round_to);
    }
  }

  int64_t columns_;
  PanelLayout layout_;
  PanelFunction compute_;
  cpu::Buffer packed_;
};

void check_dtype(DType dtype) {
  if (is_plain(dtype)) return;
  throw Error(ErrorCode::kDType, {.what = "a dense product takes float weights",
                                  .expected = "F32, F16 or BF16",
                                  .found = std::string(to_string(dtype))});
}

}  // namespace

std::unique_ptr<DenseProduct> make_packed_product(const PackedMatrix& matrix, cpu::Isa isa,
                                                  HostAllocator& allocator) {
  check_dtype(matrix.dtype);
  if (matrix.columns < 0 || matrix.k < 0) {
    throw Error(ErrorCode::kShape, "a packed matrix has a negative size");
  }
  return std::make_unique<PackedDenseProduct>(matrix, isa, allocator);
}

std::unique_ptr<DenseProduct> make_dense_product(const ConstTensorView& weights, cpu::Isa isa,
                                                 HostAllocator& allocator) {
  check_dtype(weights.dtype);
  if (weights.shape.rank() != 2) {
    throw Error(ErrorCode::kShape, {.what = "a dense product takes a matrix",
                                    .expected = "[N, K]",
                                    .found = weights.shape.to_string()});
  }
  return std::make_unique<PackedDenseProduct>(weights, isa, allocator);
}

}  // namespace conclave::inline v0::gemm
